"""A request to stop: a signal after which a run keeps a checkpoint and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybrid.links import AgreedError

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What mpirun forwards to its ranks, and batch systems send before a time limit."""


class StoppedError(AgreedError):
    """Training has stopped at a round boundary because it was asked to; every rank knows."""


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> str:
        """The name of the signal, empty without one."""
        return self.signal.name if self.signal is not None else ""

    def _take(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """A request that signals set within the body; outside the main thread none ever does."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request._take) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
