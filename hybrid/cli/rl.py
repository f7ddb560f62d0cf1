"""`hybrid rl`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.cli import options
from hybrid.errors import tell
from hybrid.ranks import launch
from hybrid.rl.resolve import check_start, help_texts, load
from hybrid.rl.settings import RlSettings

commands = typer.Typer()
_HELP, _DEFAULTS = help_texts(), RlSettings().model_dump()


def _flag(name: str, both: bool = False) -> Any:
    word = f"--{name.replace('_', '-')}"
    default = _DEFAULTS[name]
    shown = (
        "" if default in (None, 0) else f"  [default: {str(default).lower() if both else default}]"
    )
    declared = f"{word}/--no-{word[2:]}" if both else word
    return typer.Option(declared, help=_HELP[f"rl.{name}"] + shown, show_default=False)


@commands.command(
    epilog="Example: mpirun -n 3 hybrid rl --env Pendulum-v1 --steps 10000 --out runs/pendulum"
)
def rl(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="Settings as TOML; a run folder's config.toml repeats that run."),
    ] = None,
    env: Annotated[str | None, _flag("env")] = None,
    steps: Annotated[int | None, _flag("steps")] = None,
    width: Annotated[int | None, _flag("width")] = None,
    representation: Annotated[bool | None, _flag("representation", both=True)] = None,
    actors: Annotated[int | None, _flag("actors")] = None,
    lag: Annotated[int | None, _flag("lag")] = None,
    blocks: Annotated[int | None, _flag("blocks")] = None,
    batch_size: Annotated[int | None, _flag("batch_size")] = None,
    seed: Annotated[int | None, _flag("seed")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.  [default: runs/TIME-ENV]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    set_: options.AnyOther = None,
) -> None:
    """Learn to act: a representation, a learner that no gradient leaves, actors; a rank each."""
    from hybrid.folder.runfolder import RunFolder
    from hybrid.rl import start
    from hybrid.settings.text import parse_override

    comm = launch.communicator()
    given = {f"rl.{n}": v for n, v in context.params.items() if n in _DEFAULTS and v is not None}
    with options.together():
        given |= dict(map(parse_override, set_ or []))
        if resume and out is None:
            raise ValueError("--resume needs --out, the run folder to go on with")
        if resume and out is not None:
            RunFolder(out).check(resume=True)
        base = out / "config.toml" if resume and out is not None else None
        settings = load(config, given, base)
        if resume and "rl.blocks" not in given:
            settings.rl.blocks = 0  # other ranks may go on
        check_start(settings, 0 if comm is None else comm.size)
    time = options.now() if comm is None else comm.bcast(options.now())
    folder = out or Path("runs", f"{time}-{settings.rl.env.replace('/', '-')}")
    summary = start.train(settings, folder, resume)
    tell(f"return {summary['return']:.1f}; run folder {folder}", sys.stdout)
