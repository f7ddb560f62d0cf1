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
    from hybrid.links.threads import ThreadGroup, ValueBarrier
    from hybrid.ranks.machines import measure_machine, settle_machines
    from hybrid.settings.resolve import read_toml, to_toml
    from hybrid.training import build, run_settings
    from hybrid.training.remote_weights import weights_of_all

    group = launch.communicator() or ThreadGroup(0, ValueBarrier(1))
    run, notices = None, list[str]()
    with options.together():
        if (resume or auto_resume) and out is None:
            asked = "resume" if resume else "auto-resume"
            raise ValueError(f"--{asked} needs --out, the run folder to go on with")
    if (resume or auto_resume) and out is not None:
        run, notices = run_settings.find_run(out, group)
    for notice in notices:
        options.say_once(notice)
    file, time = None, options.now()
    with options.together():
        if resume and run is None:
            raise ValueError(f"{out} has no checkpoint to resume from: start a new run")
        if config is not None and group.rank == 0:
            file = read_toml(config)
    # ranks may have different clocks, and the first rank's host alone the file
    time, file = group.bcast((time, file))
    with options.together():
        elastic = auto_resume and launch.may_restart()
        given = options.overrides(context)
        resolved = run_settings.read_settings(file or {}, given, run, elastic)
    if print_config:
        options.first_says(lambda: to_toml(resolved).strip())
        return
    with options.together():
        machine = measure_machine(resolved)
    if machine is not None:
        resolved.split = settle_machines(resolved.split, group.allgather(machine))
    with options.together():
        loaded = build.load_rank_data(resolved)
    with weights_of_all(resolved.model.weights, group) as remote:
        division = None
        with options.together():
            if group.rank == 0:
                division = build.divide(resolved, loaded[0])
        division = group.bcast(division)
        with options.together():
            folder = out or run_settings.name_run_folder(resolved, time)
            where = None if remote is None else remote.path
            trainer = build.build_trainer(
                resolved, loaded, folder, run is not None, division, where
            )
        if remote is not None:
            remote.fetch(trainer.blocks, build.local_blocks(group, resolved.split))
        trainer.fit(loaded.train, loaded.test, validation=loaded.validation)
    tell(f"run folder {trainer.options.out}", sys.stdout)
