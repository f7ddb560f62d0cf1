"""The time of pieces of work within a phase, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time of pieces of work; on a GPU by events, which never stop the host."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, now: Callable[[], float]) -> Iterator[None]:
        """Count the body's time, by the clock `now` or by the GPU's."""
        if torch.cuda.is_initialized():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((first, last))
        else:
            start = now()
            yield
            self._seconds += now() - start

    def seconds(self) -> float:
        """Seconds since the last call; waits until a GPU has done the measured work."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds
