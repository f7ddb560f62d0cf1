"""`hybrid list` and `explain`: solvers, strategies, samplers, models, data sets and settings."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Literal, get_args

import typer

from hybrid.cli.options import FLAGS, first_says, say_once

commands = typer.Typer()
Kind = Literal["solvers", "sync", "samplers", "models", "data"]


@commands.command("list", epilog="Example: hybrid list solvers --json")
def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list.  [default: all]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """List solvers, strategies of replicas, samplers, models and data sets, one on each line."""

    def said() -> str:
        chosen = {each: _lines(each) for each in ([kind] if kind else get_args(Kind))}
        if as_json:
            return json.dumps(chosen, indent=2)
        width = max(len(name) for names in chosen.values() for name in names)
        parts = [
            "\n".join([title, *(f"  {name:{width}}  {line}" for name, line in names.items())])
            for title, names in chosen.items()
        ]
        return "\n\n".join(parts)

    first_says(said)


def _lines(kind: Kind) -> dict[str, str]:
    """A line about everything of a kind, by name."""
    from hybrid.data.sources import NAMES
    from hybrid.networks.models.families import FAMILIES
    from hybrid.settings.methods import NAMED
    from hybrid.solvers import registry

    def line(thing: object) -> str:
        return (inspect.getdoc(thing) or "").partition("\n")[0]

    if kind == "models":
        return {name: line(build) for name, build in FAMILIES.items()}
    if kind == "data":
        return dict(NAMES)
    known = {"solvers": registry.SOLVERS, "sync": NAMED["sync"], "samplers": NAMED["sampler"]}
    usable = known[kind].usable(say_once)
    return {name: line(inspect.getmodule(cls)) or line(cls) for name, cls in usable.items()}


@commands.command(epilog="Example: hybrid explain rounds.window")
def explain(
    setting: Annotated[
        str, typer.Argument(metavar="SECTION.KEY", help="A setting, or only its key.")
    ],
) -> None:
    """Print what a setting means, which values it takes, its default, and which methods have it."""
    from hybrid.settings.methods import explained

    flags = {dotted: f"--{name.replace('_', '-')}" for name, dotted in FLAGS.items()}
    first_says(lambda: "\n\n".join(explained(setting, flags)))
