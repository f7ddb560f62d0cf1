"""The command `hybrid`: its subcommands and exit status."""

import os
import sys
import threading
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hybrid.cli import cluster, compare, discover, folders, options, train
from hybrid.cli.failure import INTERRUPTED, run_command
from hybrid.ranks import launch
from hybrid.solvers.named import Named

ORDER = (
    *("train", "evaluate", "report", "export", "generate", "list", "explain", "show"),
    *("plan", "bench", "doctor", "submit"),
)
"""The order of commands in the help: those for newcomers first."""


class Commands(TyperGroup):
    """The commands of this package, and those of other packages, imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = self._others.added(options.say_once, lambda name: self.get_command(ctx, name))
        return [*sorted(super().list_commands(ctx), key=ORDER.index), *sorted(others)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self._others.points():
            return super().get_command(ctx, cmd_name)
        return typer.main.get_command(self._others[cmd_name])

    @property
    def _others(self) -> Named:
        return Named("command", self.commands)


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train a network in blocks, one per MPI rank or thread.",
    epilog="Example: mpirun -n 2 hybrid train --model resnet20 --data cifar10",
)

for group in (train, compare, cluster, folders, discover):
    app.registered_commands += group.commands.registered_commands


def _version(show: bool) -> None:
    if show:
        from hybrid import __version__

        typer.echo(f"hybrid {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command; every failure is one line, printed once, and a non-zero exit status."""
    status = run_command(lambda: typer.main.get_command(app).main(standalone_mode=False))
    alone = not launch.launched_size() and threading.active_count() > 1
    if status == INTERRUPTED or (status and alone):
        # other threads still run, and their libraries abort if Python exits before them
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
