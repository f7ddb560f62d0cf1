"""`hybrid doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli.options import flag

commands = typer.Typer()


@commands.command(epilog="Example: mpirun -n 2 hybrid doctor --out /scratch/me/runs")
def doctor(
    out: Annotated[Path, typer.Option(help="Folder for runs, to look at.")] = Path("."),
    data_dir: Annotated[Path | None, flag("data_dir")] = None,
) -> None:
    """Check this machine, the ranks on it, its files and its Slurm, and say what to mend."""
    from hybrid import doctor as checks

    checks.report(typer.echo, out, data_dir)
