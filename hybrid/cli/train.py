"""`hybrid train`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli import options
from hybrid.cli.options import FOLDER, Grouped
from hybrid.errors import tell
from hybrid.ranks import launch

commands = typer.Typer()


@commands.command(
    cls=Grouped,
    epilog="Example: mpirun -n 2 hybrid train --model resnet20 --data cifar10 --out run",
)
def train(
    context: typer.Context,
    config: options.TomlFile = None,
    model: options.Model = None,
    weights: Annotated[str | None, options.flag("weights")] = None,
    data: Annotated[str | None, options.flag("data")] = None,
    data_dir: options.DataDir = None,
    solver: options.Method = None,
    epochs: Annotated[int | None, options.flag("epochs")] = None,
    batch_size: options.BatchSize = None,
    lr: Annotated[float | None, options.flag("lr")] = None,
    window: Annotated[str | None, options.flag("window")] = None,
    sweeps: Annotated[int | None, options.flag("sweeps")] = None,
    blocks: Annotated[int | None, options.flag("blocks")] = None,
    replicas: Annotated[int | None, options.flag("replicas")] = None,
    seed: Annotated[int | None, options.flag("seed")] = None,
    loss: Annotated[str | None, options.flag("loss")] = None,
    precision: Annotated[str | None, options.flag("precision")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder.  [default: runs/TIME-MODEL-DATA-SOLVER]", rich_help_panel=FOLDER
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the newest checkpoint in --out.", rich_help_panel=FOLDER
        ),
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Continue if --out has a checkpoint; start if it has no metrics either.",
            rich_help_panel=FOLDER,
        ),
    ] = False,
    set_: options.AnyOther = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings as TOML instead of training.")
    ] = False,
) -> None:
    """Train a network in blocks, one per MPI rank or thread.

    Under mpirun or torchrun, blocks times replicas are the ranks; otherwise each is a thread.
    """
    from hybrid.settings.resolve import to_toml
    from hybrid.training import build

    comm = launch.communicator()
    going_on, notices = False, list[str]()
    with options.together():
        if auto_resume and out is None:
            raise ValueError("--auto-resume needs --out, the run folder to continue")
        if (resume or auto_resume) and out is not None and launch.launched_rank() == 0:
            going_on, notices = build.repair_run_folder(out)
    for notice in notices:
        tell(f"hybrid: {notice}")
    time = options.now()
    if comm is not None:
        # ranks may have different clocks and views of the folder
        time, going_on = comm.bcast((time, going_on))
    resume = resume or going_on
    settings = options.overrides(context)
    with options.together():
        resolved = build.read_settings(config, settings, out, resume)
    if print_config:
        options.first_says(lambda: to_toml(resolved).strip())
        return
    with options.together():
        loaded = build.load_rank_data(resolved)
    division = None
    with options.together():
        if comm is not None and comm.rank == 0:
            division = build.divide(resolved, loaded[0])
    if comm is not None:
        division = comm.bcast(division)
    with options.together():
        folder = out or build.name_run_folder(resolved, time)
        trainer = build.build_trainer(resolved, loaded, folder, resume, division)
    trainer.fit(loaded.train, loaded.test, validation=loaded.validation)
    tell(f"run folder {trainer.options.out}", sys.stdout)
