"""The command `hybrid rl`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.cli import options
from hybrid.errors import tell
from hybrid.ranks import launch
from hybrid_rl.settings import RlSettings

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def _flag(name: str) -> Any:
    """The flag of a setting, with its help and its default."""
    field = RlSettings.model_fields[name]
    shown = f"  [default: {field.default}]" if field.default else ""
    return typer.Option(f"--{name}", help=f"{field.description}{shown}", show_default=False)


@app.command(
    epilog="Example: mpirun -n 3 hybrid rl --env Pendulum-v1 --steps 10000 --out runs/pendulum"
)
def rl(
    context: typer.Context,
    config: options.TomlFile = None,
    env: Annotated[str | None, _flag("env")] = None,
    steps: Annotated[int | None, _flag("steps")] = None,
    width: Annotated[int | None, _flag("width")] = None,
    actors: Annotated[int | None, _flag("actors")] = None,
    blocks: Annotated[int | None, _flag("blocks")] = None,
    seed: Annotated[int | None, _flag("seed")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.  [default: runs/TIME-ENV]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")
    ] = False,
    set_: options.AnyOther = None,
) -> None:
    """Train a reinforcement-learning agent in blocks.

    Representation, learner and actors are blocks, one per rank.
    """
    from hybrid.folder.runfolder import RunFolder
    from hybrid.settings.resolve import parse_override
    from hybrid_rl.resolve import check_start, load
    from hybrid_rl.run import train

    comm = launch.communicator()
    flags = {name: context.params.get(name) for name in RlSettings.model_fields}
    given = {f"rl.{name}": value for name, value in flags.items() if value is not None}
    with options.together():
        given |= dict(map(parse_override, set_ or []))
        base = None
        if resume:
            if out is None:
                raise ValueError("--resume needs --out, the run folder to go on with")
            RunFolder(out).check(resume=True)
            base = out / "config.toml"
        settings = load(config, given, base)
        if resume and "rl.blocks" not in given:
            settings.rl.blocks = 0  # a resumed run may have another number of ranks
        check_start(settings, 0 if comm is None else comm.size)
    time = options.now() if comm is None else comm.bcast(options.now())
    folder = out or Path("runs", f"{time}-{settings.rl.env.replace('/', '-')}")
    summary = train(settings, folder, resume)
    tell(f"return {summary['return']:.1f}; run folder {folder}", sys.stdout)
