"""`hybrid evaluate`, `export`, `generate` and `report`, which read run folders."""

import os
from codecs import getincrementaldecoder
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli.options import DataDir, RunFolder, first_prints, first_says
from hybrid.settings.sections.base import MANY

commands = typer.Typer()
OwnNetwork = Annotated[
    str | None, typer.Option(help="module:function that makes your network (it is executed).")
]
Best = Annotated[bool, typer.Option("--best", help="Use the best checkpoint, by train.metric.")]


@commands.command(epilog="Example: hybrid evaluate runs/first")
def evaluate(
    run: RunFolder,
    data_dir: DataDir = None,
    model: OwnNetwork = None,
    data: Annotated[
        str | None, typer.Option(help="module:function that makes your data, as in train.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Loss; your own: module:function.")] = None,
    best: Best = False,
) -> None:
    """Measure the newest checkpoint of a run on its test set."""
    from hybrid.training import restore

    def text() -> str:
        _check_classifies(run)
        user_code = {"model": model, "data": data, "data_dir": data_dir}
        sets, folder = restore.evaluate(run, loss=loss, best=best, **user_code)
        return "\n".join(f"{name} {line(metrics)}  ({folder})" for name, metrics in sets.items())

    def line(metrics: dict[str, float]) -> str:
        metrics = {name: metrics[name] for name in [*metrics][1:]} | {"loss": metrics["loss"]}
        return ", ".join(
            f"{k} {v:.2%}" if k == "accuracy" else f"{k} {v:.4g}" for k, v in metrics.items()
        )

    first_says(text)


@commands.command(epilog="Example: hybrid export runs/first model.safetensors")
def export(
    run: RunFolder,
    target: Annotated[Path, typer.Argument(help="File (*.safetensors) or folder to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function that makes your network (it is executed); its save_pretrained, "
            "as in Hugging Face, writes the folder."
        ),
    ] = None,
    shard_gb: Annotated[
        float | None, typer.Option(help="Most gigabytes per file of a folder.  [default: 5]")
    ] = None,
    best: Best = False,
) -> None:
    """Export the newest checkpoint of a run as safetensors.

    With --model, a Hugging Face network is exported as a folder that from_pretrained reads.
    """
    from hybrid.training import restore

    def write() -> str:
        _check_classifies(run)
        restore.export(run, target, model, best=best, shard_gb=shard_gb)
        return f"wrote {target}"

    first_says(write)


@commands.command(epilog="Example: hybrid generate runs/text --prompt 'def '")
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")] = "",
    count: Annotated[
        int, typer.Option("--bytes", min=1, max=MANY, help="Bytes to write after the prompt.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: always the likeliest byte.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed of sampling.")] = 0,
    model: OwnNetwork = None,
    best: Best = False,
) -> None:
    """Generate text with a run trained on --data text."""
    from hybrid.training import restore

    def pieces() -> Iterator[str]:
        begin = os.fsencode(prompt)
        generated = restore.generate(
            run, begin, temperature=temperature, seed=seed, model=model, best=best
        )
        decoder = getincrementaldecoder("utf-8")("replace")
        for byte in chain(begin, islice(generated, count)):
            yield escaped(decoder.decode(bytes([byte])))
        yield escaped(decoder.decode(b"", final=True)) + "\n"

    def escaped(text: str) -> str:
        """Escape control characters, which a terminal would interpret."""
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)

    first_prints(pieces, end="")


@commands.command(epilog="Example: hybrid report runs/first runs/second runs/third --out compared")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the comparison of several runs.  [default: comparison]"),
    ] = None,
) -> None:
    """Write a page of tables and curves of a run, or compare runs.

    The page of a single run is RUN/report/index.html.
    """
    from hybrid import report as reports

    def write() -> str:
        if len(runs) == 1 and out is None:
            return f"wrote {reports.write(runs[0])}"
        _check_classifies(*runs)
        return f"wrote {reports.compare(runs, out or Path('comparison'))}"

    first_says(write)


def _check_classifies(*runs: Path) -> None:
    from hybrid.report import command_of

    if (other := command_of(*runs)) is not None:
        run, command, _ = other
        raise ValueError(
            f"{run} is a run of hybrid {command}, which has no test data and no one network: "
            "its summary.json has the results, and hybrid report of this run only draws them"
        )
