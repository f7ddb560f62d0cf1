"""What each rank did when, in Chrome's trace format."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident
from time import perf_counter, time
from typing import Any

import torch

from hybrid.links.grid import GridPlace

LIMIT = 4000
"""Spans that are kept of a rank's first ones, and of its last ones."""


class Trace:
    """Spans of one rank, in microseconds: the first 4,000 and the last, however long the run.

    A process is a rank, a thread one of its own; spans of a thread lie within each other.
    """

    def __init__(
        self,
        place: GridPlace | None = None,
        now: Callable[[], float] = perf_counter,
        epoch: float | None = None,
    ) -> None:
        """`epoch` is the time of day at which `now` was 0; None: it goes on as the day does."""
        self.place, self.now = place or GridPlace(), now
        self._first: list[dict[str, Any]] = []
        self._last = deque[dict[str, Any]](maxlen=LIMIT)
        self._threads: dict[int, int] = {}
        self._epoch = time() - now() if epoch is None else epoch

    @contextmanager
    def span(self, name: str, key: Sequence[int] = ()) -> Iterator[None]:
        """Record the body's time under `name`; on a GPU it is an NVTX range, too.

        `key` is of a pass: (kind, step, micro-batch, ...).
        """
        start = self.now()
        try:
            with torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext():
                yield
        finally:
            self.add(name, start, self.now(), key)

    def add(self, name: str, start: float, end: float, key: Sequence[int] = ()) -> None:
        """Record a span given by two readings of `now`."""
        thread = self._threads.setdefault(get_ident(), len(self._threads))
        times = {"ts": (self._epoch + start) * 1e6, "dur": (end - start) * 1e6}
        span = {"name": name, "ph": "X", "pid": self.place.number, "tid": thread, **times}
        if len(key) > 1:
            span["args"] = dict(zip(("step", "micro_batch"), key[1:], strict=False))
        (self._first if len(self._first) < LIMIT else self._last).append(span)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All that is kept, after the names of the rank and its threads."""
        place, number = self.place, self.place.number
        name = f"block {place.block}" + (f" of replica {place.replica}" * (place.replicas > 1))
        names = [_named("process_name", number, 0, name)]
        for thread in self._threads.values():
            names.append(_named("thread_name", number, thread, f"thread {thread}"))
        return [*names, *self._first, *self._last]


def _named(what: str, number: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": number, "tid": thread, "args": {"name": name}}
