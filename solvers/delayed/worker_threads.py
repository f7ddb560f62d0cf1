"""Threads that take the ops of a table, in its order or in none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition, Thread

import torch

from solvers.delayed.timetable import UnitPass
from solvers.delayed.units import Turn, UnitFlight


class _GivenUpError(Exception):
    """Another thread has failed, and says why."""


class _Threads:
    """This thread and others beside it; the first failure is raised here, after all have ended."""

    def __init__(self) -> None:
        self.condition = Condition()
        self.failures: list[BaseException] = []

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait within the condition; _GivenUpError if another thread fails meanwhile."""
        self.condition.wait_for(lambda: ready() or self.failures)
        if self.failures:
            raise _GivenUpError

    def run(self, own: Callable[[], None], others: Sequence[Callable[[], None]]) -> None:
        count = torch.get_num_threads()

        def guarded(work: Callable[[], None]) -> None:
            try:
                torch.set_num_threads(count)  # of each thread, or sums would differ
                work()
            except _GivenUpError:
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


class WorkerThreads(_Threads):
    """A thread for the forward slot, this one, and one for each backward slot.

    Each takes its ops in the table's order. Those of a unit have their turns in that order, too,
    so that what meets what does not depend on how fast a thread is.
    """

    def __init__(self, ops: Sequence[UnitPass]) -> None:
        super().__init__()
        self._ops = ops
        self._turns: dict[int, deque[UnitPass]] = {}
        for op in ops:
            self._turns.setdefault(op.unit, deque()).append(op)
        self._rising = {op.item for op in ops if op.forward}
        """Items whose forward pass is not over."""

    def take(self, do: Callable[[UnitPass, Turn], None], slots: int, units: int) -> None:
        """Do all ops; `slots` backward slots, `units` units."""

        def lane(mine: Sequence[UnitPass]) -> None:
            for op in mine:
                if not op.forward and op.unit == units - 1:
                    self._wait_for_graph(op.item)
                do(op, self._turn(op))
                if op.forward and op.unit == units - 1:
                    with self.condition:
                        self._rising.discard(op.item)
                        self.condition.notify_all()

        forward = [op for op in self._ops if op.forward]
        backward = [
            [o for o in self._ops if not o.forward and o.item % slots == j] for j in range(slots)
        ]
        self.run(partial(lane, forward), [partial(lane, mine) for mine in backward])

    def _wait_for_graph(self, item: int) -> None:
        with self.condition:
            self.wait_for(lambda: item not in self._rising)

    @contextmanager
    def _turn(self, op: UnitPass) -> Iterator[None]:
        with self.condition:
            self.wait_for(lambda: self._turns[op.unit][0] == op)
        yield
        with self.condition:
            self._turns[op.unit].popleft()
            self.condition.notify_all()


class Race(_Threads):
    """One thread that takes flights up, this one, and others that take them home, in any order."""

    def __init__(self, waiting: Iterable[UnitFlight], room: int) -> None:
        super().__init__()
        self._waiting = deque(waiting)
        self._room = room
        """Flights that may wait before the next goes up."""
        self._broken_off: list[UnitFlight] = []
        self._over = False

    def take(
        self,
        rising: Iterator[UnitFlight],
        home: Callable[[UnitFlight, Callable[[], bool]], None],
        threads: int,
    ) -> list[UnitFlight]:
        """Until all have risen; those that are not home, in order.

        `home` takes a flight home, or as far as it comes until it is told to stop.
        """

        def up() -> None:
            try:
                for flight in rising:
                    with self.condition:
                        self._waiting.append(flight)
                        self.condition.notify_all()
                        self.wait_for(lambda: len(self._waiting) <= self._room)
            finally:
                with self.condition:
                    self._over = True
                    self.condition.notify_all()

        def down() -> None:
            while flight := self._next():
                home(flight, lambda: self._over)
                if flight.left:
                    self._broken_off.append(flight)

        self.run(up, [down] * threads)
        return sorted([*self._broken_off, *self._waiting], key=lambda flight: flight.part.step)

    def _next(self) -> UnitFlight | None:
        with self.condition:
            self.wait_for(lambda: self._waiting or self._over)
            if self._over:
                return None
            flight = self._waiting.popleft()
            self.condition.notify_all()
            return flight
