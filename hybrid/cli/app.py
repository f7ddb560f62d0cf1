"""The `hybrid` command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.ranks import launch
from hybrid.settings import config as settings

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Layer-parallel training of residual networks with auxiliary variables.",
    epilog="Example: mpirun -n 2 hybrid train --model resnet20 --data cifar10 --epochs 30",
)

_HELP = settings.declared_settings()
_DEFAULTS = settings.Config().model_dump()


def _flag(name: str, key: str) -> Any:
    section, _, field = key.partition(".")
    default = _DEFAULTS[section].get(field, "")
    shown = f"  [default: {default}]" if default not in ("", 0) else ""
    return typer.Option(name, help=_HELP[key] + shown, show_default=False)


@app.command(
    epilog="Example: mpirun -n 4 hybrid train --model resnet20 --data cifar10 --data-dir ~/data "
    "--epochs 30 --window 16 --set solver.beta=1e-3 --out runs/first"
)
def train(
    config: Annotated[
        Path | None,
        typer.Argument(help="Settings as TOML; a run folder's config.toml repeats that run."),
    ] = None,
    model: Annotated[str | None, _flag("--model", "model.name")] = None,
    data: Annotated[str | None, _flag("--data", "data.name")] = None,
    data_dir: Annotated[str | None, _flag("--data-dir", "data.dir")] = None,
    solver: Annotated[str | None, _flag("--solver", "solver.name")] = None,
    factorise: Annotated[str | None, _flag("--factorise", "model.factorise")] = None,
    epochs: Annotated[int | None, _flag("--epochs", "train.epochs")] = None,
    batch_size: Annotated[int | None, _flag("--batch-size", "train.batch_size")] = None,
    lr: Annotated[float | None, _flag("--lr", "optimiser.lr")] = None,
    window: Annotated[str | None, _flag("--window", "rounds.window")] = None,
    sweeps: Annotated[int | None, _flag("--sweeps", "rounds.sweeps")] = None,
    correct_every: Annotated[int | None, _flag("--correct-every", "rounds.correct_every")] = None,
    blocks: Annotated[int | None, _flag("--blocks", "split.blocks")] = None,
    seed: Annotated[int | None, _flag("--seed", "train.seed")] = None,
    precision: Annotated[str | None, _flag("--precision", "train.precision")] = None,
    kernels: Annotated[str | None, _flag("--kernels", "train.kernels")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/TIME-MODEL-DATA-SOLVER]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Train a network: K blocks on K MPI ranks under mpirun, else on K threads."""
    from hybrid.runs import build

    now = _agreed(datetime.now().strftime("%Y%m%d-%H%M%S"))
    with _together():
        given = {
            "model.name": model,
            "data.name": data,
            "data.dir": data_dir,
            "solver.name": solver,
            "model.factorise": factorise,
            "train.epochs": epochs,
            "train.batch_size": batch_size,
            "optimiser.lr": lr,
            "rounds.window": _window(window),
            "rounds.sweeps": sweeps,
            "rounds.correct_every": correct_every,
            "split.blocks": blocks,
            "train.seed": seed,
            "train.precision": precision,
            "train.kernels": kernels,
        }
        overrides = {key: value for key, value in given.items() if value is not None}
        overrides |= dict(settings.parse_override(text) for text in set_ or [])
        resolved = build.read(config, overrides, out, resume)
        loaded = build.load_data(resolved)
        folder = out or build.new_folder(resolved, now)
        trainer = build.trainer(resolved, loaded, folder, resume)
    trainer.fit(*loaded)
    typer.echo(f"run folder {trainer.out}")


@app.command(
    epilog="Example: mpirun -n 2 --bind-to none hybrid bench --model resnet20 --micro-batches 4,8"
)
def bench(
    config: Annotated[Path | None, typer.Argument(help="Settings as TOML.")] = None,
    model: Annotated[str | None, _flag("--model", "model.name")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data set; accuracy needs a real one.  [default: synthetic]"),
    ] = None,
    data_dir: Annotated[str | None, _flag("--data-dir", "data.dir")] = None,
    batch_size: Annotated[int | None, _flag("--batch-size", "train.batch_size")] = None,
    lr: Annotated[float | None, _flag("--lr", "optimiser.lr")] = None,
    micro_batches: Annotated[
        str, typer.Option(help="Numbers of micro-batches of the pipelined rows.")
    ] = "4,8",
    turns: Annotated[int, typer.Option(min=1, help="Times every row is measured.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Mini-batches a row and turn.")] = 4,
    rows: Annotated[
        str, typer.Option(help="Only rows with one of these words in their names.")
    ] = "",
    to_accuracy: Annotated[
        float | None, typer.Option(min=0, max=1, help="Also train to this test accuracy.")
    ] = None,
    epochs: Annotated[str, typer.Option(help="Lengths of the trainings to accuracy.")] = "3,6",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings a row and length.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for JSON, Markdown and plot.")] = Path("bench"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Compare all ways to train one network on these ranks, interleaved in one run."""
    comm = launch.communicator()
    if comm is None:
        raise ValueError("hybrid bench compares ranks, and there is 1: mpirun -n 2 hybrid bench")
    from hybrid.bench.run import Bench
    from hybrid.runs import build

    with _together():
        given = {
            "model.name": model,
            "data.name": data or (None if config else "synthetic"),
            "data.dir": data_dir,
            "train.batch_size": batch_size,
            "optimiser.lr": lr,
        }
        overrides = {key: value for key, value in given.items() if value is not None}
        overrides |= dict(settings.parse_override(text) for text in set_ or [])
        lengths, parts = _numbers("--epochs", epochs), _numbers("--micro-batches", micro_batches)
        words = [word.strip() for word in rows.split(",") if word.strip()]
        made = Bench(comm, build.read(config, overrides, None, False), parts, words, out)
    made.connect()
    table = made.run(turns, steps, to_accuracy, lengths, seeds)
    if table is not None:
        typer.echo(table + f"written to {out}")


@app.command(epilog="Example: hybrid plan --model resnet56 --blocks 2,4,8,16 --gigabits 10")
def plan(
    config: Annotated[Path | None, typer.Argument(help="Settings as TOML.")] = None,
    model: Annotated[str | None, _flag("--model", "model.name")] = None,
    solver: Annotated[str | None, _flag("--solver", "solver.name")] = None,
    data: Annotated[
        str | None, typer.Option(help="Data set that gives the shapes.  [default: synthetic]")
    ] = None,
    data_dir: Annotated[str | None, _flag("--data-dir", "data.dir")] = None,
    blocks: Annotated[str, typer.Option(help="Numbers of blocks.")] = "2,4",
    micro_batches: Annotated[str, typer.Option(help="Numbers of micro-batches.")] = "4,8",
    batch_size: Annotated[int | None, _flag("--batch-size", "train.batch_size")] = None,
    gigabits: Annotated[float | None, _flag("--gigabits", "links.gigabits_per_second")] = None,
    latency: Annotated[float | None, _flag("--latency", "links.latency_microseconds")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Predict from this machine alone what K ranks would do, and say which setting to take."""
    given = {
        "model.name": model,
        "solver.name": solver,
        "data.name": data or (None if config else "synthetic"),
        "data.dir": data_dir,
        "train.batch_size": batch_size,
        "links.gigabits_per_second": gigabits,
        "links.latency_microseconds": latency,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    overrides |= dict(settings.parse_override(text) for text in set_ or [])
    counts, parts = _numbers("--blocks", blocks), _numbers("--micro-batches", micro_batches)
    from hybrid.bench.plan import report

    with _together():
        if launch.launched_rank() == 0:
            resolved = settings.load(config, overrides)
            typer.echo(report(resolved, counts, parts, lambda text: typer.echo(text, err=True)))


@app.command(
    epilog="Example: hybrid submit runs/first/config.toml --nodes 2 --ranks-per-node 4 --array 0-4 "
    "--setup 'module load openmpi; source .venv/bin/activate' --out runs/seeds"
)
def submit(
    config: Annotated[Path, typer.Argument(help="Settings as TOML, read when the job starts.")],
    nodes: Annotated[int, typer.Option(help="Nodes of a job.")],
    ranks_per_node: Annotated[int, typer.Option(help="MPI ranks a node, one block each.")],
    gpus_per_rank: Annotated[
        int | None,
        typer.Option(help="GPUs a rank; 0: none.  [default: 1; 0 if train.device is cpu]"),
    ] = None,
    cpus_per_rank: Annotated[int, typer.Option(help="Cores, and threads, a rank.")] = 8,
    time: Annotated[
        str, typer.Option(help="Time limit of a job: minutes, HH:MM:SS or D-HH:MM:SS.")
    ] = "04:00:00",
    array: Annotated[
        str, typer.Option(metavar="SEEDS", help="A job a seed, 0,1,2 or 0-4, in OUT-seedS.")
    ] = "",
    max_requeues: Annotated[
        int, typer.Option(help="Times a job that its time limit stops may go on.")
    ] = 20,
    partition: Annotated[str, typer.Option(help="Partition of the cluster.")] = "",
    account: Annotated[str, typer.Option(help="Account that pays.")] = "",
    launcher: Annotated[
        str, typer.Option(help="What starts the ranks: mpirun, or srun (with PMIx).")
    ] = "mpirun",
    setup: Annotated[
        str, typer.Option(help="Shell commands that make hybrid and MPI available in the job.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, on a file system all nodes see; script and log lie beside it.  "
            "[default: runs/TIME-MODEL-DATA-SOLVER]"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Hand a training to Slurm: it checkpoints at its time limit, is requeued and goes on."""
    from hybrid.ranks import slurm
    from hybrid.runs import build

    if launch.launched_rank() > 0:
        return
    resolved = settings.load(config, dict(settings.parse_override(text) for text in set_ or []))
    if gpus_per_rank is None:
        gpus_per_rank = 0 if resolved.train.device == "cpu" else 1
    if out is None:
        out = build.new_folder(resolved, datetime.now().strftime("%Y%m%d-%H%M%S"))
    request = slurm.Request(
        config=config.absolute(),
        out=Path(os.path.abspath(out)),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_rank=gpus_per_rank,
        cpus_per_rank=cpus_per_rank,
        time=time,
        seeds=array,
        max_requeues=max_requeues,
        partition=partition,
        account=account,
        launcher=launcher,
        setup=setup,
        settings=tuple(set_ or ()),
    )
    slurm.check_blocks(resolved.split, request)
    slurm.check_setup(setup)
    if dry_run:
        typer.echo(slurm.script(request), nl=False)
        return
    typer.echo(slurm.submit(request))
    typer.echo(f"script {request.file}", err=True)


@app.command(epilog="Example: hybrid evaluate runs/first")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data_dir: Annotated[str | None, _flag("--data-dir", "data.dir")] = None,
) -> None:
    """Print the test accuracy of a run's newest checkpoint."""
    from hybrid.runs import build

    with _together():
        if launch.launched_rank() == 0:
            accuracy, checkpoint = build.evaluate(run, data_dir)
            typer.echo(f"test accuracy {accuracy:.2%}  ({checkpoint})")


@app.command(epilog="Example: hybrid export runs/first model.safetensors")
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    file: Annotated[Path, typer.Argument(help="File to write, FILE.safetensors.")],
) -> None:
    """Write the composed network of a run's newest checkpoint as one safetensors state dict."""
    from hybrid.runs import build

    with _together():
        if launch.launched_rank() == 0:
            build.export(run, file)
            typer.echo(f"wrote {file}")


@app.command(epilog="Example: hybrid report runs/first")
def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data_dir: Annotated[str | None, _flag("--data-dir", "data.dir")] = None,
) -> None:
    """Write RUN/report/index.html: tables, curves and what the model's factors respond to."""
    from hybrid import report as reports

    with _together():
        if launch.launched_rank() == 0:
            typer.echo(f"wrote {reports.write(run, data_dir)}")


@app.command(epilog="Example: mpirun -n 2 hybrid doctor --out /scratch/me/runs")
def doctor(
    out: Annotated[Path, typer.Option(help="Folder for runs, to look at.")] = Path("."),
    data_dir: Annotated[Path | None, _flag("--data-dir", "data.dir")] = None,
) -> None:
    """Check this machine, the ranks on it, its files and its Slurm, and say what to mend."""
    from hybrid import doctor as checks

    checks.report(typer.echo, out, data_dir)


def _window(text: str | None) -> int | str | None:
    """What --window gives: a number, or a word for the settings to judge."""
    number = text is not None and re.fullmatch(r"-?[0-9]{1,18}", text)
    return int(text) if text is not None and number else text


def _numbers(name: str, text: str) -> list[int]:
    """A list of positive integers, "4,8"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,18}", part) and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {text!r}; write positive integers with commas, such as 4,8")
    return [int(part) for part in parts]


def _version(asked: bool) -> None:
    if asked:
        from hybrid import __version__

        typer.echo(f"hybrid {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command; every failure is one line, said once, and a non-zero exit."""
    from hybrid.cli.failure import INTERRUPTED, run_command

    status = run_command(lambda: typer.main.get_command(app).main(standalone_mode=False))
    if status == INTERRUPTED:
        # blocks may be at work on their threads: libraries abort when Python ends under them
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


@contextmanager
def _together() -> Iterator[None]:
    """Under mpirun all ranks get through the body, or all raise the first one's reason."""
    comm = launch.communicator()
    if comm is None:
        yield
        return
    from hybrid.links.mpi import MpiLinks

    with MpiLinks(comm).agreement():
        yield


def _agreed(now: str) -> str:
    """Rank 0's time, because clocks differ."""
    comm = launch.communicator()
    return now if comm is None else str(comm.bcast(now))
