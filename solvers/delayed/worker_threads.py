"""Threads that run the passes of a table, in its order or in any."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition, Thread

import torch

from hybrid.solvers.delayed.units import UnitFlight, UnitLock
from hybrid.solvers.exact.pipeline import Kind, Op


class _OtherFailedError(Exception):
    """Another thread has failed, and its error says why."""


class _Threads:
    """This thread and others beside it; the first failure is raised here, after all have ended."""

    def __init__(self) -> None:
        self.condition = Condition()
        self.failures: list[BaseException] = []

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait within the condition; _OtherFailedError if another thread fails meanwhile."""
        self.condition.wait_for(lambda: ready() or self.failures)
        if self.failures:
            raise _OtherFailedError

    def run_all(self, own: Callable[[], None], others: Sequence[Callable[[], None]]) -> None:
        """`own` on this thread and `others` on threads of their own, until all have ended."""
        count = torch.get_num_threads()

        def guarded(work: Callable[[], None]) -> None:
            try:
                torch.set_num_threads(count)  # of each thread, or sums would differ
                work()
            except _OtherFailedError:
                pass
            except BaseException as error:
                with self.condition:
                    self.failures.append(error)
                    self.condition.notify_all()

        threads = [Thread(target=guarded, args=(work,), daemon=True) for work in others]
        for thread in threads:
            thread.start()
        guarded(own)
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


class TableThreads(_Threads):
    """This thread for the forward slot, and one for each backward slot.

    Each runs its passes in the table's order. The passes of a unit wait for each other in that
    order, too, so which weights a pass uses does not depend on how fast a thread is.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        super().__init__()
        self._ops = ops
        self._next: dict[int, deque[Op]] = {}
        """Of each unit, in order."""
        for op in ops:
            self._next.setdefault(op.unit, deque()).append(op)
        self._forward_running = {op.item for op in ops if op.kind is Kind.FORWARD}
        """Items whose forward pass is not complete."""

    def run(self, work: Callable[[Op, UnitLock], None], slots: int, units: int) -> None:
        """Call `work` for all passes; there are `slots` backward slots and `units` units."""

        def slot(mine: Sequence[Op]) -> None:
            for op in mine:
                if op.kind is Kind.BACKWARD and op.unit == units - 1:
                    self._wait_for_graph(op.item)
                work(op, self._in_order(op))
                if op.kind is Kind.FORWARD and op.unit == units - 1:
                    with self.condition:
                        self._forward_running.discard(op.item)
                        self.condition.notify_all()

        forward = [op for op in self._ops if op.kind is Kind.FORWARD]
        backward = [
            [o for o in self._ops if o.kind is Kind.BACKWARD and o.item % slots == j]
            for j in range(slots)
        ]
        self.run_all(partial(slot, forward), [partial(slot, mine) for mine in backward])

    def _wait_for_graph(self, item: int) -> None:
        with self.condition:
            self.wait_for(lambda: item not in self._forward_running)

    @contextmanager
    def _in_order(self, op: Op) -> Iterator[None]:
        """Within it all earlier passes of the unit have been here, and no later one."""
        with self.condition:
            self.wait_for(lambda: self._next[op.unit][0] == op)
        yield
        with self.condition:
            self._next[op.unit].popleft()
            self.condition.notify_all()


class AnyOrderThreads(_Threads):
    """This thread for forward passes, and others for backward passes in whatever order."""

    def __init__(self, waiting: Iterable[UnitFlight], queue: int) -> None:
        super().__init__()
        self._waiting = deque(waiting)
        self._queue = queue
        """Flights that may wait before the next forward pass begins."""
        self._broken_off: list[UnitFlight] = []
        self._stopping = False

    def run(
        self,
        forward_passes: Iterator[UnitFlight],
        backward_pass: Callable[[UnitFlight, Callable[[], bool]], None],
        threads: int,
    ) -> list[UnitFlight]:
        """Run all forward passes; gives the flights whose backward pass is not complete, in order.

        `backward_pass` goes through a flight's units until the function that it is given is true.
        """

        def forward() -> None:
            try:
                for flight in forward_passes:
                    with self.condition:
                        self._waiting.append(flight)
                        self.condition.notify_all()
                        self.wait_for(lambda: len(self._waiting) <= self._queue)
            finally:
                with self.condition:
                    self._stopping = True
                    self.condition.notify_all()

        def backward() -> None:
            while flight := self._next_waiting():
                backward_pass(flight, lambda: self._stopping)
                if flight.units_left:
                    self._broken_off.append(flight)

        self.run_all(forward, [backward] * threads)
        return sorted([*self._broken_off, *self._waiting], key=lambda flight: flight.part.step)

    def _next_waiting(self) -> UnitFlight | None:
        with self.condition:
            self.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            flight = self._waiting.popleft()
            self.condition.notify_all()
            return flight
