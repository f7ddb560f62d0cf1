"""`hybrid bench` and `hybrid plan`: the speed of methods, measured and predicted."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.cli import options
from hybrid.cli.options import MACHINE, METHOD, RANKS, TASK, Grouped
from hybrid.ranks import launch

commands = typer.Typer()


@commands.command(
    cls=Grouped, epilog="Example: mpirun -n 2 --bind-to none hybrid bench --model resnet20"
)
def bench(
    context: typer.Context,
    config: options.TomlFile = None,
    model: options.Model = None,
    data: Annotated[
        str | None, typer.Option(help="Data set.  [default: synthetic]", rich_help_panel=TASK)
    ] = None,
    data_dir: options.DataDir = None,
    batch_size: options.BatchSize = None,
    micro_batches: Annotated[
        str, typer.Option(help="Numbers of micro-batches to measure.")
    ] = "4,8",
    turns: Annotated[int, typer.Option(min=1, help="Measurements of each row.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Mini-batches per measurement.")] = 4,
    rows: Annotated[
        str,
        typer.Option(help="Only rows whose names contain one of these words (comma-separated)."),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of the results, as JSON and Markdown.")] = Path(
        "bench"
    ),
    set_: options.AnyOther = None,
) -> None:
    """Measure the speed of all methods on these ranks.

    The rows take turns, so that a change of the machine's speed affects all alike.
    """
    comm = launch.communicator()
    if comm is None:
        raise ValueError(
            "hybrid bench needs several ranks, and there is 1: mpirun -n 2 hybrid bench"
        )
    from hybrid.bench.bench import Bench
    from hybrid.training import run_settings

    with options.together():
        parts = options.numbers("--micro-batches", micro_batches)
        words = [word.strip() for word in rows.split(",") if word.strip()]
        resolved = run_settings.read_settings(config, _settings(context))
        measurements = Bench(comm, resolved, parts, words, out)
    measurements.connect()
    if (table := measurements.run(turns, steps)) is not None:
        typer.echo(table + f"written to {out}")


@commands.command(
    cls=Grouped, epilog="Example: hybrid plan --model resnet56 --ranks 2,4,8 --gigabits 10"
)
def plan(
    context: typer.Context,
    config: options.TomlFile = None,
    model: options.Model = None,
    solver: options.Method = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set, for the shape of its samples; your own: module:function.  "
            "[default: synthetic]",
            rich_help_panel=TASK,
        ),
    ] = None,
    loss: Annotated[str | None, options.flag("loss")] = None,
    data_dir: options.DataDir = None,
    counts: Annotated[
        str | None,
        typer.Option(
            "--blocks",
            help="Numbers of blocks to predict.  [default: 2,4, or as split.cuts]",
            rich_help_panel=RANKS,
        ),
    ] = None,
    replicas: Annotated[int | None, options.flag("replicas")] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Numbers of ranks; predict every grid of blocks and replicas.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    micro_batches: Annotated[
        str,
        typer.Option(
            help="Numbers of micro-batches to predict; one of at least K - 1 is added.",
            rich_help_panel=METHOD,
        ),
    ] = "2,4,8",
    batch_size: options.BatchSize = None,
    gigabits: Annotated[float | None, options.flag("gigabits")] = None,
    latency: Annotated[float | None, options.flag("latency")] = None,
    device: Annotated[
        Path | None,
        typer.Option(help="TOML profile of a device to plan for.", rich_help_panel=MACHINE),
    ] = None,
    set_: options.AnyOther = None,
) -> None:
    """Predict the fastest method for given ranks and links.

    It times the network's passes on this machine, and predicts all methods and grids.
    """
    if ranks is not None and (counts is not None or replicas is not None):
        raise ValueError(
            f"--ranks {ranks} stands for every grid of that size: leave out --blocks and --replicas"
        )
    blocks = None if counts is None else options.numbers("--blocks", counts)
    totals = [] if ranks is None else options.numbers("--ranks", ranks)
    parts = options.numbers("--micro-batches", micro_batches)
    from hybrid.bench.plan.advice import report
    from hybrid.bench.plan.device import Device
    from hybrid.ranks.progress import Bar
    from hybrid.settings.resolve import load
    from hybrid.training import references

    def lines() -> Iterator[str]:
        settings = _settings(context)
        resolved = load(config, settings)
        references.check_code_is_given(resolved, settings)
        profile = None if device is None else Device.read(device)
        with Bar(0, text="cutting the network") as bar:
            say = partial(typer.echo, err=True)
            yield from report(resolved, blocks, totals, parts, say, profile, bar)

    options.first_prints(lines)


def _settings(context: typer.Context) -> dict[str, Any]:
    """Read the settings of the command line; without a TOML file, the data default to synthetic."""
    images = {} if context.params["config"] else {"data.name": "synthetic"}
    return images | options.overrides(context)
