"""A request to stop is a signal after which a run writes a checkpoint and ends.

This module imports nothing heavy: the command listens before imports that take seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from hybrid.errors import StoppedError, printable, tell
from hybrid.ranks import launcher

if TYPE_CHECKING:
    from hybrid.links import RankLinks

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""What mpirun passes to its ranks, and batch systems and supervisors send before they kill."""


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.advice = ""
        """How to go on with the run, once it has a checkpoint."""

    def __call__(self) -> str:
        """The name of the signal, empty without one."""
        return self.signal.name if self.signal is not None else ""

    def _take(self, number: int, frame: Any) -> None:
        """Note the first signal; a SIGTERM after it ends the process at once."""
        if number == signal.SIGTERM and self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = self.signal or signal.Signals(number)
        by_mpirun = os.environ.get("OMPI_COMM_WORLD_RANK") == "0"
        if number == signal.SIGTERM and by_mpirun and self.advice:
            # mpirun kills its ranks a quarter of a second after Ctrl-C or TERM
            launcher.say(f"hybrid: interrupted{self.advice}")


_current: StopRequest | None = None


@contextmanager
def listening(last: bool = False) -> Iterator[StopRequest]:
    """A request to stop, which signals make within the body; only the main thread gets signals.

    Nested bodies share one request. After the `last` body the process only ends, so signals are
    ignored from then on: one would end it with a signal's status.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    if _current is not None:
        yield _current
        return
    request = _current = StopRequest()
    before = {number: signal.signal(number, request._take) for number in SIGNALS}
    try:
        yield request
    finally:
        _current = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)
        if last:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def ctrl_c() -> str:
    """What an interrupt is answered with: a training that has a checkpoint can go on."""
    return "interrupted" + (_current.advice if _current is not None else "")


def interrupted() -> KeyboardInterrupt:
    """An interrupt that a script, a notebook or a command answers with one line."""
    error = KeyboardInterrupt(ctrl_c())
    vars(error)["_render_traceback_"] = lambda: [f"hybrid: {error}"]  # IPython asks for it
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = in_one_line(sys.excepthook)
    return error


def in_one_line(show: Callable[..., Any], speaks: bool = True) -> Callable[..., None]:
    """A hook for exceptions that prints such an interrupt as a line, and any other as before.

    Only a rank that `speaks` prints the line.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if hasattr(error, "_render_traceback_"):
            if speaks:
                tell(f"hybrid: {error}")
        else:
            show(kind, error, trace)

    return hook


@contextmanager
def after(seconds: float, act: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Call `act` in a thread if the body takes longer."""
    timer = threading.Timer(seconds, act, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def meeting() -> Iterator[None]:
    """Let a SIGTERM end this process at once while it waits for other ranks, one of which is lost.

    Such a wait may be inside torch, where no handler runs; nothing is lost, for nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_alone(rank: int) -> None:
    """Raise StoppedError on this rank, which waits to meet the others, if it was asked to."""
    if _current is not None and (name := _current()):
        why = f"stopped by {name} while the ranks met; nothing has been done or changed"
        if rank == 0:
            tell(f"hybrid: {why}")
        raise StoppedError(why)


def leave_if_asked(links: RankLinks, request: StopRequest) -> None:
    """Raise StoppedError on all ranks if one of them was asked to stop before training began."""
    first = links.first_of(request() or None)
    if first:
        leave(links, f"{first} before training began; nothing has been done or changed")


def leave(links: RankLinks, how: str) -> NoReturn:
    """Stop by a signal: the first rank says how, once, and all raise StoppedError."""
    why = f"stopped by {how}"
    if links.place.number == 0:
        tell(f"hybrid: {printable(why)}")
    links.broadcast(None)  # a rank that raises earlier may end the job before the line is out
    raise StoppedError(why)
