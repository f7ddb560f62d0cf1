"""`hybrid doctor` and `submit`: checks of a machine, and Slurm jobs."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli.options import AnyOther, Grouped, Model, flag, now, overrides
from hybrid.ranks import launch

commands = typer.Typer()


@commands.command(epilog="Example: mpirun -n 2 hybrid doctor --out /scratch/me/runs")
def doctor(out: Annotated[Path, typer.Option(help="Folder of runs to check.")] = Path(".")) -> None:
    """Check ranks, MPI, GPUs and a folder of runs for problems."""
    from hybrid import doctor as checks

    checks.report(typer.echo, out)


@commands.command(
    cls=Grouped,
    epilog="Example: hybrid submit runs/first/config.toml --nodes 2 --ranks-per-node 4 "
    "--setup 'module load openmpi; source .venv/bin/activate' --out runs/second",
)
def submit(
    context: typer.Context,
    config: Annotated[
        Path, typer.Argument(help="TOML file of settings; the job reads it when it starts.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="MPI ranks per node; a rank has one block.")
    ],
    model: Model = None,
    data: Annotated[str | None, flag("data")] = None,
    loss: Annotated[str | None, flag("loss")] = None,
    replicas: Annotated[int | None, flag("replicas")] = None,
    gpus_per_rank: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs per rank; 0: none.  [default: 1; 0 if train.device is cpu]"),
    ] = None,
    cpus_per_rank: Annotated[int, typer.Option(min=1, help="Cores and threads per rank.")] = 8,
    time: Annotated[
        str, typer.Option(help="Time limit of a job: minutes, HH:MM:SS or D-HH:MM:SS.")
    ] = "04:00:00",
    max_requeues: Annotated[
        int, typer.Option(min=0, help="Most continuations after a time limit.")
    ] = 20,
    partition: Annotated[str, typer.Option(help="Partition.")] = "",
    account: Annotated[str, typer.Option(help="Account to charge.")] = "",
    launcher: Annotated[
        str, typer.Option(help="Launcher of the ranks: mpirun, or srun (with PMIx).")
    ] = "mpirun",
    setup: Annotated[
        str, typer.Option(help="Shell commands that set up hybrid and MPI in the job.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, on a shared file system; script and log lie beside it.  "
            "[default: runs/TIME-MODEL-DATA-SOLVER]"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script instead of submitting it.")
    ] = False,
    set_: AnyOther = None,
) -> None:
    """Submit a training to Slurm, requeued at its time limit.

    Before the limit it writes a checkpoint, from which the requeued job resumes.
    """
    from hybrid.ranks import slurm
    from hybrid.settings.resolve import load
    from hybrid.training import references, run_settings

    if launch.launched_rank() > 0:
        return
    settings = overrides(context)
    resolved = load(config, settings)
    references.check_code_is_given(resolved, settings)
    if gpus_per_rank is None:
        gpus_per_rank = 0 if resolved.train.device == "cpu" else 1
    out = out or run_settings.name_run_folder(resolved, now())
    values = {f.name: context.params.get(f.name) for f in fields(slurm.SlurmJob)}
    values |= {"config": config.absolute(), "out": Path(os.path.abspath(out))}
    named = {"model.name": model, "data.name": data, "train.loss": loss}
    code = [f"{dotted}={name}" for dotted, name in named.items() if name is not None]
    values |= {"gpus_per_rank": gpus_per_rank, "settings": (*code, *(set_ or ()))}
    job = slurm.SlurmJob(**values)  # type: ignore[arg-type]
    slurm.check_grid(resolved.split, job)
    if dry_run:
        typer.echo(slurm.script(job), nl=False)
        return
    typer.echo(slurm.submit(job))
    typer.echo(f"script {job.file}", err=True)
