"""Errors in words."""

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

MOST_CHARACTERS = 1200
STOPPED = 75
"""The exit status after a request to stop: unfinished, to be resumed (EX_TEMPFAIL)."""
ON_META = "on the meta device, which holds no numbers: make it on the CPU"
OWN = {"hybrid"}
"""Packages that refuse by ValueError; a wing adds itself when imported."""
_is_command = False
_LIBRARIES = {"", "torch", "numpy", "mpi4py", "safetensors", *sys.stdlib_module_names}


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Any text on one line of at most `most` characters, its control characters escaped."""
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} ... {text[-2 * most :]}"
    words = " ".join(text.split())
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return safe if len(safe) <= most else f"{safe[: most * 3 // 4]} ... {safe[-most // 5 :]}"


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 epoch, 2 epochs."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def tell(text: str, stream: TextIO | None = None) -> bool:
    """Write a line to stderr, or another stream; False if that fails, after which it is silenced.

    A reader that has ended, or a full disk, must not end a training.
    """
    out = stream or sys.stderr
    try:
        print(text, file=out, flush=True)
    except (OSError, ValueError):  # closed by the other side, or by this one
        with suppress(OSError, ValueError):
            silence(out.fileno())
        return False
    return True


def silence(descriptor: int) -> None:
    """Redirect an open file to nowhere: Python writes its buffer when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@contextmanager
def command() -> Iterator[None]:
    """Let remedies name flags, as in the command `hybrid`, for a while."""
    global _is_command
    before, _is_command = _is_command, True
    try:
        yield
    finally:
        _is_command = before


def given_by(flag: str, argument: str) -> str:
    """How the user gives something: by a flag of the command, or by an argument in a script."""
    return flag if _is_command else argument


class AgreedError(ValueError):
    """An error that all ranks know of and raise together; the first rank alone prints it."""


class PeerError(RuntimeError):
    """Another rank has failed, and reports the reason itself."""


class StoppedError(SystemExit):
    """A training has stopped on request; every rank raises it, and the first has said why.

    Uncaught, it ends the process with `STOPPED`. It is no Exception, because a loop that survives
    the failure of one training must not begin the next one after a request to stop.
    """

    def __init__(self, why: str) -> None:
        super().__init__(STOPPED)
        self.why = why

    def __str__(self) -> str:
        return self.why


class CodeError(ValueError):
    """Code that was given to this package, or torch in it, failed; `__cause__` is how."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn sys.exit() in code that is given to this package into an error.

    Its status may be 0, although nothing was trained. Ctrl-C and requests to stop pass unchanged.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, StoppedError):
        raise
    except BaseException as error:
        raise CodeError(format_error(error)) from error


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn an exception of a user's code into a ValueError that says what failed, and where."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {format_error(error)}") from None


def code_line(error: BaseException, called_back: bool = False) -> str:
    """File and line of the innermost frame outside libraries; empty if that is this package's.

    `called_back`: this package is called by that frame, and is passed over.
    """
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module in OWN:
            where = where if called_back else ""
        elif module not in _LIBRARIES:
            where = f"{Path(frame.f_code.co_filename).name}, line {line}"
    return where


def calling_line() -> str:
    """File and line of the innermost frame outside libraries that is running now."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in OWN and module not in _LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}, line {line}"
    return ""


def format_error(error: BaseException) -> str:
    """An error of a user's code on one line: its kind, its text, and where it came from."""
    where = code_line(error)
    text = f"{type(error).__name__}: {one_line(error)}" + (f" ({where})" if where else "")
    if isinstance(error, Exception):
        return text
    return f"{text} would end the process: raise an error if the code fails, else return"


def one_line(error: BaseException) -> str:
    """An error's text on one line, with the file's name where the system gives it apart."""
    try:
        text = str(error)
    except Exception as other:  # whatever a user's __str__ raises
        text = f"{type(error).__name__}, whose text fails with {type(other).__name__}"
    if isinstance(error, SystemExit) and error.code is None:
        text = "None"
    if isinstance(error, OSError) and error.strerror and error.filename:
        # of a name that is blank, or has a line break, nothing or another name would be seen
        name = str(error.filename)
        shown = name if name.isprintable() and name == name.strip() else ascii(name)
        text = f"{shown}: {error.strerror}"
    return printable(text) or type(error).__name__


def reason(error: BaseException) -> str:
    """The text of any error, and the file with its traceback unless the text says everything."""
    kind = f"{type(error).__name__}: "
    if isinstance(error, CodeError):
        kind = ""
    elif isinstance(error, (ValueError, OSError, PeerError)):
        return one_line(error)
    with tempfile.NamedTemporaryFile(
        "w", prefix="hybrid-error-", suffix=".log", delete=False
    ) as file:
        traceback.print_exception(error, file=file)
    return f"{kind}{one_line(error)} (details in {file.name})"
