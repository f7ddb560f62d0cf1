"""What each rank did when, in Chrome's trace format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter, time
from typing import Any

import torch

LIMIT = 5000


class Trace:
    """Spans of one rank, in microseconds; only the first 5,000, so a week's run stays small."""

    def __init__(self, rank: int = 0, now: Callable[[], float] = perf_counter) -> None:
        self.rank, self.now = rank, now
        self.events: list[dict[str, Any]] = []
        self._epoch = time() - now()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the body's time under `name`; on a GPU it is an NVTX range, too."""
        start = self.now()
        try:
            with torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext():
                yield
        finally:
            self.add(name, start, self.now())

    def add(self, name: str, start: float, end: float) -> None:
        """Record a span given by two readings of `now`."""
        if len(self.events) < LIMIT:
            times = {"ts": (self._epoch + start) * 1e6, "dur": (end - start) * 1e6}
            self.events.append({"name": name, "ph": "X", "pid": self.rank, "tid": 0, **times})
