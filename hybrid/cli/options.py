"""Flags that several commands have, and what their bodies share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.ranks import launch
from hybrid.settings.config import Config, declared_settings

_HELP = declared_settings()
_DEFAULTS = Config().model_dump()


def flag(name: str, key: str) -> Any:
    """The flag of a setting, with its help and its default."""
    section, _, field = key.partition(".")
    default = _DEFAULTS[section].get(field, "")
    shown = f"  [default: {default}]" if default not in ("", 0, None) else ""
    return typer.Option(name, help=_HELP[key] + shown, show_default=False)


TomlFile = Annotated[Path | None, typer.Argument(help="Settings as TOML.")]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.")]
Model = Annotated[str | None, flag("--model", "model.name")]
DataDir = Annotated[str | None, flag("--data-dir", "data.dir")]
Method = Annotated[str | None, flag("--solver", "solver.name")]
BatchSize = Annotated[int | None, flag("--batch-size", "train.batch_size")]
LearningRate = Annotated[float | None, flag("--lr", "optimiser.lr")]
AnyOther = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
]


def overrides(given: Mapping[str, Any], others: Sequence[str] | None) -> dict[str, Any]:
    """What flags and --set give, over the TOML file."""
    from hybrid.settings.text import parse_override

    said = {key: value for key, value in given.items() if value is not None}
    return said | dict(parse_override(text) for text in others or [])


def numbers(name: str, text: str) -> list[int]:
    """A list of positive integers, "4,8"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,18}", part) and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {text!r}; write positive integers with commas, such as 4,8")
    return [int(part) for part in parts]


def now() -> str:
    """The time, as the name of a run folder begins."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


@contextmanager
def together() -> Iterator[None]:
    """Under mpirun all ranks get through the body, or all raise the first one's reason."""
    comm = launch.communicator()
    if comm is None:
        yield
        return
    from hybrid.links.mpi import MpiLinks

    with MpiLinks(comm).agreement():
        yield
