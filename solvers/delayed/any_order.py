"""Threads that run forward and backward passes in whatever order they have time for."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread

import torch

from hybrid.solvers.delayed.unit_passes import UnitFlight


class _OtherFailedError(Exception):
    """Another thread has failed, and its error says why."""


class AnyOrder:
    """This thread for forward passes, and others for backward passes."""

    def __init__(self, waiting: Iterable[UnitFlight], queue: int) -> None:
        self._waiting = deque(waiting)
        self._queue = queue
        """Flights that may wait before the next forward pass begins."""
        self._broken_off: list[UnitFlight] = []
        self._stopping = False
        self._condition = Condition()
        self._failures: list[BaseException] = []

    def run(
        self,
        forward_passes: Iterator[UnitFlight],
        backward_pass: Callable[[UnitFlight, Callable[[], bool]], None],
        threads: int,
    ) -> list[UnitFlight]:
        """Run all forward passes; gives the flights whose backward pass is not complete, in order.

        `backward_pass` goes through a flight's units until the function that it is given is true.
        The first failure is raised here, after all threads have ended.
        """
        count = torch.get_num_threads()

        def backward() -> None:
            torch.set_num_threads(count)  # of each thread, or sums would differ
            while flight := self._next_waiting():
                backward_pass(flight, lambda: self._stopping)
                if flight.units_left:
                    self._broken_off.append(flight)

        others = [
            Thread(target=self._guarded, args=(backward,), daemon=True) for _ in range(threads)
        ]
        for thread in others:
            thread.start()
        self._guarded(lambda: self._forward(forward_passes))
        for thread in others:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return sorted([*self._broken_off, *self._waiting], key=lambda flight: flight.part.step)

    def _forward(self, forward_passes: Iterator[UnitFlight]) -> None:
        try:
            for flight in forward_passes:
                with self._condition:
                    self._waiting.append(flight)
                    self._condition.notify_all()
                    self._wait_for(lambda: len(self._waiting) <= self._queue)
        finally:
            with self._condition:
                self._stopping = True
                self._condition.notify_all()

    def _next_waiting(self) -> UnitFlight | None:
        with self._condition:
            self._wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            flight = self._waiting.popleft()
            self._condition.notify_all()
            return flight

    def _wait_for(self, ready: Callable[[], object]) -> None:
        """Wait within the condition; _OtherFailedError if another thread fails meanwhile."""
        self._condition.wait_for(lambda: ready() or self._failures)
        if self._failures:
            raise _OtherFailedError

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _OtherFailedError:
            pass
        except BaseException as error:
            with self._condition:
                self._failures.append(error)
                self._condition.notify_all()
