"""`hybrid list`, `explain` and `show`: names, settings, and cuts of a network."""

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from hybrid.cli import options
from hybrid.cli.options import FLAGS, Grouped, first_says, say_once

commands = typer.Typer()
Kind = Literal["solvers", "sync", "samplers", "models", "data"]


@commands.command("list", epilog="Example: hybrid list solvers --json")
def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list.  [default: all]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """List solvers, strategies, samplers, models and data sets."""

    def text() -> str:
        chosen = {each: _lines(each) for each in ([kind] if kind else get_args(Kind))}
        if as_json:
            return json.dumps(chosen, indent=2)
        parts = []
        for title, names in chosen.items():
            width = max(map(len, names))
            parts.append([title, *(f"  {name:{width}}  {line}" for name, line in names.items())])
        return "\n\n".join("\n".join(lines) for lines in parts)

    first_says(text)


def _lines(kind: Kind) -> dict[str, str]:
    from hybrid.data.sources import NAMES
    from hybrid.networks.models.families import FAMILIES
    from hybrid.settings.methods import NAMED
    from hybrid.solvers import registry

    def line(item: object) -> str:
        return (inspect.getdoc(item) or "").partition("\n")[0]

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
        str, typer.Argument(metavar="SECTION.KEY", help="A setting, or its key alone.")
    ],
) -> None:
    """Explain a setting: its meaning, values, default and conditions."""
    from hybrid.settings.methods import explanations

    flags = {dotted: f"--{name.replace('_', '-')}" for name, dotted in FLAGS.items()}
    first_says(lambda: "\n\n".join(explanations(setting, flags)))


@commands.command(
    cls=Grouped, epilog="Example: hybrid show resnet56 --blocks 8 --picture blocks.svg"
)
def show(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Network; your own: module:function.")],
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Number of blocks.  [default: 2]")
    ] = None,
    cuts: Annotated[
        str | None, typer.Option(help="First unit of each block after the first (comma-separated).")
    ] = None,
    balance: Annotated[
        Literal["operations", "measured", "even"] | None,
        typer.Option(help="What blocks share evenly; even: the number of units."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Type and shape of a sample: float32[3,224,224], or by name "
            "ids=int64[9],mask=int64[9].  [default for built-in networks: float32[3,32,32], or "
            "int64[256] for text]"
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data set that has such samples, instead of --inputs.")
    ] = None,
    data_dir: options.DataDir = None,
    batch_size: options.BatchSize = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Optimizer, for its memory.  [default: sgd]")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Tell whether it fits into machines of that memory: 24GB, 16GiB."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=0, help="Fold units whose names agree in the first N parts; 0: a row per block."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw it to this file (.svg or .png).")
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print what each block does when, by --solver.")
    ] = False,
    solver: options.Method = None,
    set_: options.AnyOther = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show how a network is cut, or what its blocks do when."""

    def text() -> str:
        from hybrid.bench.show import picture as pictures
        from hybrid.bench.show.request import show as describe
        from hybrid.bench.show.schedule import schedule_text

        if picture is not None:
            pictures.check_picture(picture)
        settings = options.overrides(context)
        if cuts is not None:
            settings["split.cuts"] = [name.strip() for name in cuts.split(",")]
        if balance is not None:
            settings["split.balance"] = balance
        if optimizer is not None:
            settings["optimizer.name"] = optimizer
        read = {"solver.messages", "solver.adjoints", "split.inside"} & settings.keys()
        _check_shown(context, schedule, memory or read)
        if schedule:
            return schedule_text(settings)
        description = describe(settings, inputs, memory)
        if picture is not None:
            pictures.draw(description, picture, depth)
        return json.dumps(asdict(description), indent=2) if as_json else description.text(depth)

    first_says(text)


OF_CUTS = (
    "memory",
    "balance",
    "inputs",
    "data",
    "data_dir",
    "optimizer",
    "depth",
    "picture",
    "as_json",
)
OF_SCHEDULES = ("solver", "set_")


def _check_shown(context: typer.Context, schedule: bool, read: object) -> None:
    """Reject flags of cuts with --schedule, and those of methods where neither it nor the `read`
    needs them."""
    others = OF_CUTS if schedule else () if read else OF_SCHEDULES
    name = next((n for n in others if context.params[n]), None)
    if name is not None:
        flag = {"set_": "--set", "as_json": "--json"}.get(name, f"--{name.replace('_', '-')}")
        where = (
            "with --schedule: leave one of the two out"
            if schedule
            else "without --schedule or --memory"
        )
        raise ValueError(f"{flag} has no effect {where}")
