"""`hybrid list` and `explain`: solvers, strategies, samplers, models, data sets and settings."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Literal

import typer

from hybrid.cli.options import FLAGS, first_says

commands = typer.Typer()
Kind = Literal["solvers", "sync", "samplers", "models", "data"]


@commands.command("list", epilog="Example: hybrid list solvers --json")
def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list.  [default: all]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """List solvers, strategies of replicas, samplers, models and data sets, one on each line."""
    everything = _everything()
    chosen = everything if kind is None else {kind: everything[kind]}

    def said() -> str:
        if as_json:
            return json.dumps(chosen, indent=2)
        width = max(len(name) for names in chosen.values() for name in names)
        parts = [
            "\n".join([title, *(f"  {name:{width}}  {line}" for name, line in names.items())])
            for title, names in chosen.items()
        ]
        return "\n\n".join(parts)

    first_says(said)


def _everything() -> dict[str, dict[str, str]]:
    """Kind -> name -> a line about it."""
    from hybrid.data.sources import NAMES
    from hybrid.models.names import FAMILIES
    from hybrid.settings.methods import NAMED
    from hybrid.solvers import registry

    def line(thing: object) -> str:
        return (inspect.getdoc(thing) or "").partition("\n")[0]

    def of_module(cls: type) -> str:
        """The first line of the file of a method, strategy or sampler."""
        return line(inspect.getmodule(cls)) or line(cls)

    return {
        "solvers": {n: of_module(registry.solver_class(n)) for n in registry.names()},
        "sync": {n: of_module(cls) for n, cls in NAMED["sync"].items()},
        "samplers": {n: of_module(cls) for n, cls in NAMED["sampler"].items()},
        "models": {name: line(build) for name, build in FAMILIES.items()},
        "data": dict(NAMES),
    }


@commands.command(epilog="Example: hybrid explain rounds.window")
def explain(
    setting: Annotated[
        str, typer.Argument(metavar="SECTION.KEY", help="A setting, or only its key.")
    ],
) -> None:
    """Print what a setting means, which values it takes, its default, and which methods have it."""
    from hybrid.settings.explaining import explained

    flags = {dotted: f"--{name.replace('_', '-')}" for name, dotted in FLAGS.items()}
    first_says(lambda: "\n\n".join(explained(setting, flags)))
