"""Flags and helpers shared by several commands."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hybrid.errors import tell
from hybrid.links.communicator import agreement
from hybrid.ranks import launch
from hybrid.settings.config import Config, declared_settings

TASK, TRAINING, METHOD = "Network and data", "Training", "Method"
RANKS, FOLDER, MACHINE = "Blocks and replicas", "Run folder", "Machine"
_HELP = declared_settings()
_DEFAULTS = Config().model_dump()
FLAGS: dict[str, str] = {
    "model": "model.name",
    "weights": "model.weights",
    "data": "data.name",
    "data_dir": "data.dir",
    "solver": "solver.name",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "optimizer.lr",
    "window": "rounds.window",
    "sweeps": "rounds.sweeps",
    "blocks": "split.blocks",
    "replicas": "split.replicas",
    "seed": "train.seed",
    "precision": "train.precision",
    "loss": "train.loss",
    "gigabits": "links.gigabits_per_second",
    "latency": "links.latency_microseconds",
}
"""Parameter of a command -> its setting."""
PANELS = {
    **dict.fromkeys(("model", "data", "train.loss"), TASK),
    **dict.fromkeys(("train", "optimizer"), TRAINING),
    **dict.fromkeys(("solver", "rounds"), METHOD),
    **dict.fromkeys(("split",), RANKS),
    **dict.fromkeys(("links",), MACHINE),
}
"""Section, or setting -> the group of its flags in the help."""


def flag(name: str) -> Any:
    """Make the flag of a setting, with its help and default."""
    section, _, field = FLAGS[name].partition(".")
    default = _DEFAULTS[section].get(field)
    suffix = f"  [default: {default}]" if default else ""
    return typer.Option(
        f"--{name.replace('_', '-')}",
        help=_HELP[FLAGS[name]] + suffix,
        show_default=False,
        rich_help_panel=PANELS.get(FLAGS[name]) or PANELS[section],
    )


TomlFile = Annotated[
    Path | None,
    typer.Argument(help="TOML file of settings; the config.toml of a run repeats that run."),
]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.")]
Model = Annotated[str | None, flag("model")]
DataDir = Annotated[str | None, flag("data_dir")]
Method = Annotated[str | None, flag("solver")]
BatchSize = Annotated[int | None, flag("batch_size")]
AnyOther = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated."),
]


class Grouped(TyperCommand):
    """A command that prints its flags under the `rich_help_panel` of each, in plain lines."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                panel = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(panel, []).append(record)
        groups["Options"] = groups.pop("Options", [])  # the last
        width = min(30, max(len(name) for rows in groups.values() for name, _ in rows))
        for panel, rows in groups.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


def overrides(context: typer.Context) -> dict[str, Any]:
    """Read settings from flags and --set, which override the TOML file."""
    from hybrid.settings.resolve import parse_override

    texts = list(context.params.get("set_") or [])
    values = {n: v for n, v in context.params.items() if n in FLAGS and v is not None}
    if "window" in values:  # a number or a word, parsed like --set
        texts.insert(0, f"{FLAGS['window']}={values.pop('window')}")
    return {FLAGS[n]: v for n, v in values.items()} | dict(map(parse_override, texts))


def numbers(name: str, text: str) -> list[int]:
    """Parse a list of positive integers, "4,8"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,18}", part) and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {text!r}; write positive integers with commas, such as 4,8")
    return [int(part) for part in parts]


def now() -> str:
    """Return the time, for the name of a run folder."""
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def first_says(text: Callable[[], str]) -> None:
    """Make and print a text on rank 0; if that fails, raise the error on all ranks."""
    first_prints(lambda: [text()])


def first_prints(lines: Callable[[], Iterable[str]], end: str = "\n") -> None:
    """Make and print lines on rank 0, one by one; if that fails, raise the error on all ranks."""
    with together():
        if launch.launched_rank() == 0:
            for line in lines():
                # look sys.stdout up anew: rich replaces it while a bar is shown
                typer.echo(line + end, file=sys.stdout, nl=False)


def say_once(text: str) -> None:
    """Print a line on rank 0."""
    if launch.launched_rank() == 0:
        tell(f"hybrid: {text}")


@contextmanager
def together() -> Iterator[None]:
    """Run the body; if it fails on any rank, raise the first rank's error on all ranks."""
    comm = launch.communicator()
    with nullcontext() if comm is None else agreement(comm.first_of):
        yield
