"""Links with a logical clock for each rank: K blocks in turn, timed as if on K machines."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid.links.base import Program, Start, num_bytes
from hybrid.links.network import Network
from hybrid.links.threads import Room, SharedSum, ThreadLinks, run_threads

T = TypeVar("T")


class VirtualLinks(ThreadLinks):
    """A rank runs while it holds the baton, of which there is one, and its clock counts that time.

        send      leaves = max(own clock, end of the last send) + bytes / bandwidth
        receive   own clock = max(own clock, leaves + latency)
        gather    own clock = max of all clocks + latency ceil(log2 of the ranks), as a broadcast
        sum       from its last vector on as `Network.sum_seconds`

    To each neighbor, and to all peers together, a rank sends one message at a time.

    The clocks therefore show what K ranks of this speed would need, even if this machine is busy:
    with one thread for each rank they count processor time, with more or on a GPU real time.
    """

    name, clocked = "virtual", True
    settings = frozenset({"gigabits_per_second", "latency_microseconds"})

    def __init__(
        self, number: int, room: Room, network: Network, baton: threading.Lock, threads: int
    ) -> None:
        super().__init__(number, room)
        self._network, self._baton = network, baton
        alone = threads == 1 and not torch.cuda.is_available()
        self._timer: Callable[[], float] = thread_time if alone else perf_counter
        self._clock = self._begun = 0.0
        self._free = {-1: 0.0, 1: 0.0, 0: 0.0}
        """When the connection to the previous block, the next one and the peers is free again."""
        self._message_seconds = 0.0

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        threads, (blocks, replicas) = torch.get_num_threads(), start.grid
        network = Network.asked(start.settings)
        return run_virtual(blocks, program, network, threads, replicas, cls)[0]

    def now(self) -> float:
        return self._clock + self._timer() - self._begun

    def epoch(self) -> float:
        """That of all ranks: their clocks begin together, though they run in turn."""
        return self._room.begun

    def count_nothing_here(self, message_seconds: float) -> None:
        """Count no time of this machine from now on, but `work` and messages alone.

        A message takes each of its two ranks so long beside its way.
        """
        self._timer = lambda: 0.0
        self._begun, self._message_seconds = 0.0, message_seconds

    def work(self, seconds: float) -> None:
        """Count work that would be done elsewhere, and is not done here."""
        self._clock += seconds

    def run(self, program: Program[T]) -> T:
        with self._baton:
            self._begun = self._timer()
            return program(self)

    def _send(self, number: int, tensor: Tensor) -> None:
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self.work(self._message_seconds)
        way = number - self.place.number if self.place.in_chain(number) else 0
        seconds = self._network.seconds(num_bytes(tensor))
        self._free[way] = max(self.now(), self._free[way]) + seconds
        arrival = self._free[way] + self._network.latency_seconds
        self._put(number, (tensor, arrival))

    def _receive(self, number: int) -> Tensor:
        tensor: Tensor
        with self._paused():
            tensor, arrival = self._take(number)
        self._clock = max(self._clock, arrival) + self._message_seconds
        return tensor

    def _wait_for(self, shared: SharedSum) -> None:
        with self._paused():
            super()._wait_for(shared)

    def _total(self, shared: SharedSum) -> Tensor:
        with self._paused():  # the vectors would be added up on their way, by all ranks together
            total, begun = shared.total()
        self._summed(begun, num_bytes(total))
        return total

    def _summed(self, begun: float, of_vector: int) -> None:
        """Let the clock go on to the end of a sum that has begun when the last vector was there."""
        travels, latency = self._network.sum_seconds(of_vector, self.place.replicas)
        self._free[0] = max(begun, self._free[0]) + travels
        self._clock = max(self._clock, self._free[0] + latency)

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        return self._meet(value, grid, 1.0)

    def _gather(self, value: T, at: int) -> list[T] | None:
        everyone = self._meet(value, True, 0.5)
        return everyone if self.place.number == at else None

    def _broadcast(self, value: T, at: int) -> T:
        return self._meet(value, True, 0.5)[at]

    def _meet(self, value: T, grid: bool, ways: float) -> list[T]:
        """The values of all, which go to one rank and back; or one of the two ways."""
        with self._paused():
            everyone: list[tuple[T, float]] = super()._all_gather((value, self._clock), grid)
        latest = max(clock for _, clock in everyone)
        self._clock = latest + ways * self._network.meeting_seconds(len(everyone))
        return [theirs for theirs, _ in everyone]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Let other ranks run, while this rank's clock stands still."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._clock = self.now()
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()
            self._begun = self._timer()


def run_virtual(
    blocks: int,
    program: Program[T],
    network: Network | None = None,
    intra_op_threads: int = 1,
    replicas: int = 1,
    links: Callable[..., VirtualLinks] = VirtualLinks,
) -> list[T]:
    """Run `program` on a grid of ranks in turn, each on its own clock; results by place."""
    baton = threading.Lock()

    def make(number: int, room: Room) -> Any:
        return links(number, room, network or Network(), baton, intra_op_threads)

    return run_threads(blocks, program, intra_op_threads, make, replicas)
