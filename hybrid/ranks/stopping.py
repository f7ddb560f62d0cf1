"""Requests to stop: signals after which a run writes a checkpoint and ends.

This module imports nothing heavy: the command handles signals before imports that take seconds.
"""

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
"""Signals that mpirun forwards, and that batch systems and supervisors send before SIGKILL."""


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.advice = ""
        """How to resume the run, once it has a checkpoint."""

    def __call__(self) -> str:
        """Return the name of the signal, empty without one."""
        return self.signal.name if self.signal is not None else ""

    def _take(self, number: int, frame: Any) -> None:
        """Note the first signal; a SIGTERM after it ends the process at once."""
        if number == signal.SIGTERM and self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = self.signal or signal.Signals(number)
        by_mpirun = os.environ.get("OMPI_COMM_WORLD_RANK") == "0"
        if number == signal.SIGTERM and by_mpirun and self.advice:
            # mpirun kills its ranks 0.25 s after Ctrl-C or TERM
            launcher.say(f"hybrid: interrupted{self.advice}")


_current: StopRequest | None = None


@contextmanager
def listening(last: bool = False) -> Iterator[StopRequest]:
    """Record signals in a request to stop while the body runs; only the main thread gets signals.

    Nested bodies share one request. After the `last` body the process is about to exit, so signals
    are ignored: one would change its exit status.
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
    """Return the message of an interrupt, with the way to resume if there is a checkpoint."""
    return "interrupted" + (_current.advice if _current is not None else "")


def interrupted() -> KeyboardInterrupt:
    """Make a KeyboardInterrupt that a script, a notebook or a command shows as one line."""
    error = KeyboardInterrupt(ctrl_c())
    vars(error)["_render_traceback_"] = lambda: [f"hybrid: {error}"]  # IPython asks for it
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = in_one_line(sys.excepthook)
    return error


def in_one_line(show: Callable[..., Any], speaks: bool = True) -> Callable[..., None]:
    """Wrap an exception hook to show such an interrupt as one line, if this rank `speaks`."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if hasattr(error, "_render_traceback_"):
            if speaks:
                tell(f"hybrid: {error}")
        else:
            show(kind, error, trace)

    return hook


@contextmanager
def after(seconds: float, act: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Call `act` in a thread if the body takes longer than `seconds`."""
    timer = threading.Timer(seconds, act, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def meeting() -> Iterator[None]:
    """Let SIGTERM end this process at once while it waits for other ranks, one of which is lost.

    Such a wait may be inside torch, where no Python handler runs. No work is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_unmet(rank: int) -> None:
    """Raise StoppedError after a signal while this rank waits to meet the others."""
    if _current is not None and (name := _current()):
        why = f"stopped by {name} while the ranks met; nothing has been done or changed"
        if rank == 0:
            tell(f"hybrid: {why}")
        raise StoppedError(why)


def leave_if_asked(links: "RankLinks", request: StopRequest) -> None:
    """Raise StoppedError on all ranks if one of them got a signal before training began."""
    first = links.first_of(request() or None)
    if first:
        leave(links, f"{first} before training began; nothing has been done or changed")


def leave(links: "RankLinks", how: str) -> NoReturn:
    """Print the reason on the first rank, and raise StoppedError on all ranks."""
    why = f"stopped by {how}"
    if links.place.number == 0:
        tell(f"hybrid: {printable(why)}")
    links.broadcast(None)  # a rank that raises earlier may end the job before the line is out
    raise StoppedError(why)
