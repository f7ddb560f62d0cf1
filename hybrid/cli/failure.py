"""Errors of the command: one line, printed once, and an exit status."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

from hybrid import errors
from hybrid.errors import command as as_command
from hybrid.links.communicator import Communicator, abort
from hybrid.ranks import launch, progress
from hybrid.ranks.stopping import ctrl_c

USAGE, FAILED, INTERRUPTED = 2, 1, 130


@as_command()
def run_command(command: Callable[[], Any]) -> int:
    """Run `command` and return the exit status. Only rank 0 prints to the terminal.

    After an error on which all ranks agree, each ends by itself; any other error ends the MPI job.
    """
    if launch.launched_rank() > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    comm = None
    try:
        comm = launch.communicator()
        result = command()
        if result == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt as error:
        return _say(str(error) or ctrl_c(), INTERRUPTED)
    except errors.StoppedError:  # its reason has been printed
        return _together(comm, errors.STOPPED)
    except errors.AgreedError as error:
        return _together(comm, _say(error, FAILED))
    except BaseException as error:
        error = _of_output(error)
        if hasattr(error, "format_message"):
            words = error.format_message().split() or ["see hybrid --help"]
            return _together(comm, _say(" ".join(words), USAGE))
        if not isinstance(error, Exception):  # such as SystemExit in user code
            error = errors.CodeError(errors.format_error(error))
        if comm is not None:
            abort(comm, error)
        return _say(errors.reason(error), FAILED, getattr(error, "speaks", False))


def _of_output(error: BaseException) -> BaseException:
    """Name standard output in an error of printing; return any other error unchanged."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, OSError):  # typer's
        error = error.__context__
    *_, (frame, _) = walk_tb(error.__traceback__)
    if not (isinstance(error, OSError) and frame.f_code.co_name == "echo"):
        return error
    with suppress(OSError, ValueError):
        errors.silence(sys.stdout.fileno())
    return OSError(error.errno, error.strerror, "standard output")


def _together(comm: Communicator | None, status: int) -> int:
    """Wait for all ranks, so that rank 0 has printed before any rank ends."""
    if comm is not None:
        comm.barrier()
    return status


def _say(error: object, status: int, speaks: bool = False) -> int:
    progress.close()
    if speaks or launch.launched_rank() == 0:
        errors.tell(f"hybrid: error: {errors.printable(str(error))}")
    return status
