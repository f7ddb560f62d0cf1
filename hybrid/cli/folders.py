"""`hybrid evaluate`, `export` and `report`: what a run folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli.options import DataDir, RunFolder, first_says

commands = typer.Typer()


@commands.command(epilog="Example: hybrid evaluate runs/first")
def evaluate(run: RunFolder, data_dir: DataDir = None) -> None:
    """Print the test accuracy of a run's newest checkpoint."""
    from hybrid.runs import restore

    first_says(lambda: "test accuracy {:.2%}  ({})".format(*restore.evaluate(run, data_dir)))


@commands.command(epilog="Example: hybrid export runs/first model.safetensors")
def export(
    run: RunFolder, file: Annotated[Path, typer.Argument(help="File to write, FILE.safetensors.")]
) -> None:
    """Write the composed network of a run's newest checkpoint as one safetensors state dict."""
    from hybrid.runs import restore

    def written() -> str:
        restore.export(run, file)
        return f"wrote {file}"

    first_says(written)


@commands.command(epilog="Example: hybrid report runs/first")
def report(run: RunFolder, data_dir: DataDir = None) -> None:
    """Write RUN/report/index.html: tables, curves and what the model's factors respond to."""
    from hybrid import report as reports

    first_says(lambda: f"wrote {reports.write(run, data_dir)}")
