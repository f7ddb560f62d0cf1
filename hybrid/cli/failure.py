"""How the command ends when something goes wrong: one line, once, and a non-zero exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.errors import (
    STOPPED,
    AgreedError,
    CodeError,
    StoppedError,
    format_error,
    printable,
    reason,
    tell,
)
from hybrid.ranks import launch

USAGE, FAILED, INTERRUPTED = 2, 1, 130


def run_command(command: Callable[[], Any]) -> int:
    """Run `command`; give the exit status. Ranks other than 0 print nothing to the terminal.

    Errors that every rank knows of end the ranks one by one; any other ends the MPI job at once.
    """
    if launch.launched_rank() > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        comm = launch.communicator()
    except ValueError as error:
        return _say(error, FAILED)
    try:
        result = command()
        if result == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return _say("interrupted; go on with --resume", INTERRUPTED)
    except StoppedError:  # which has been said
        return _together(comm, STOPPED)
    except AgreedError as error:
        return _leave(comm, error, FAILED)
    except BaseException as error:
        if hasattr(error, "format_message"):
            words = error.format_message().split() or ["see hybrid --help"]
            return _leave(comm, " ".join(words), USAGE)
        if not isinstance(error, Exception):  # of code that was given: nothing here exits
            error = CodeError(format_error(error))
        if comm is not None:
            from hybrid.links.mpi import abort

            abort(comm, error)
        return _say(reason(error), FAILED)


def _leave(comm: Any, error: object, status: int) -> int:
    """Every rank is here: rank 0 speaks, and none leaves before it has."""
    return _together(comm, _say(error, status))


def _together(comm: Any, status: int) -> int:
    if comm is not None:
        comm.Barrier()
    return status


def _say(error: object, status: int) -> int:
    if launch.launched_rank() == 0:
        tell(f"hybrid: error: {printable(str(error))}")
    return status
