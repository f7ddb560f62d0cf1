"""The `hybrid` command in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout

import typer

from hybrid.cli.app import app
from hybrid.cli.failure import run_command

APP = typer.main.get_command(app)


def command(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    line = [str(word) for word in words]
    with redirect_stdout(out), redirect_stderr(err):
        status = run_command(lambda: APP.main(args=line, standalone_mode=False))
    return status, out.getvalue(), err.getvalue()
