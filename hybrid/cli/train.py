"""`hybrid train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli.options import (
    AnyOther,
    BatchSize,
    DataDir,
    LearningRate,
    Method,
    Model,
    flag,
    now,
    overrides,
    together,
)
from hybrid.ranks import launch

commands = typer.Typer()


@commands.command(
    epilog="Example: mpirun -n 4 hybrid train --model resnet20 --data cifar10 --data-dir ~/data "
    "--epochs 30 --window 16 --set solver.beta=1e-3 --out runs/first"
)
def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="Settings as TOML; a run folder's config.toml repeats that run."),
    ] = None,
    model: Model = None,
    data: Annotated[str | None, flag("data")] = None,
    data_dir: DataDir = None,
    solver: Method = None,
    factorise: Annotated[str | None, flag("factorise")] = None,
    epochs: Annotated[int | None, flag("epochs")] = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    window: Annotated[str | None, flag("window")] = None,
    sweeps: Annotated[int | None, flag("sweeps")] = None,
    correct_every: Annotated[int | None, flag("correct_every")] = None,
    blocks: Annotated[int | None, flag("blocks")] = None,
    seed: Annotated[int | None, flag("seed")] = None,
    precision: Annotated[str | None, flag("precision")] = None,
    kernels: Annotated[str | None, flag("kernels")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/TIME-MODEL-DATA-SOLVER]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    set_: AnyOther = None,
) -> None:
    """Train a network: K blocks on K MPI ranks under mpirun, else on K threads."""
    from hybrid.runs import build

    time = _agreed(now())
    with together():
        resolved = build.read(config, overrides(context), out, resume)
        loaded = build.load_data(resolved)
        folder = out or build.new_folder(resolved, time)
        trainer = build.trainer(resolved, loaded, folder, resume)
    trainer.fit(*loaded)
    typer.echo(f"run folder {trainer.out}")


def _agreed(time: str) -> str:
    """Rank 0's time, because clocks differ."""
    comm = launch.communicator()
    return time if comm is None else str(comm.bcast(time))
