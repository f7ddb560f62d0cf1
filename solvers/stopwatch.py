"""The time of pieces of work within a phase, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Clock(Protocol):
    """What links know of time."""

    clocked: bool
    """Whether `now` counts work rather than the time of the wall."""

    def now(self) -> float: ...


@dataclass
class Stopwatch:
    """Adds up the time of pieces of work; on a GPU by events, which never stop the host."""

    counted: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """The beginnings and ends of a GPU's work whose times have not been read."""

    def __add__(self, other: Stopwatch) -> Stopwatch:
        return Stopwatch(self.counted + other.counted, self.events + other.events)

    @contextmanager
    def timing(self, clock: Clock) -> Iterator[None]:
        """Count the body's time by that clock or, where it is the wall's, by the GPU's."""
        if torch.cuda.is_initialized() and not clock.clocked:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self.events.append((first, last))
        else:
            start = clock.now()
            yield
            self.counted += clock.now() - start

    def seconds(self) -> float:
        """Seconds so far; waits until a GPU has done the measured work."""
        for first, last in self.events:
            last.synchronize()
            self.counted += first.elapsed_time(last) / 1e3
        self.events = []
        return self.counted
