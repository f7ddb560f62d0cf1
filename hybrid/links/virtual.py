"""Links with a logical clock for each rank: K blocks in turn, timed as if on K machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log2
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid.links.base import Program, Start
from hybrid.links.threads import (
    SharedSum,
    ThreadGroup,
    ThreadLinks,
    ThreadTeam,
    ValueBarrier,
    run_threads,
)
from hybrid.settings.config import LinkSettings

T = TypeVar("T")
_RING_BYTES = 1 << 16
"""From which on Open MPI sums in a ring."""


@dataclass(frozen=True)
class LinkSpeed:
    """Rate and latency of a link of two ranks, which carries one message at a time each way."""

    bytes_per_second: float = 10e9 / 8
    """Every rank has this rate, whatever its host's other ranks send."""
    latency_seconds: float = 10e-6

    @classmethod
    def of(cls, links: LinkSettings) -> LinkSpeed:
        """The speed that the settings of [links] describe."""
        rate = links.gigabits_per_second * 1e9 / 8
        return cls(rate, links.latency_microseconds * 1e-6)

    def seconds(self, num_bytes: float) -> float:
        """Time until bytes have left."""
        return num_bytes / self.bytes_per_second

    def meeting_seconds(self, ranks: int) -> float:
        """Time until a value of each of n ranks has reached all: 2 latency ceil(log2 n)."""
        return 2 * ceil(log2(ranks)) * self.latency_seconds

    def sum_seconds(self, num_bytes: float, replicas: int) -> tuple[float, float]:
        """Time to send the sum of a vector of B bytes of each of R replicas, and its latency.

            ring      2 (R-1)/R B / rate                 2 (R-1) latency
            tree      2 ceil(log2 R) B / rate            2 ceil(log2 R) latency

        MPI takes a tree below 64 KiB.
        """
        R = replicas
        if num_bytes < _RING_BYTES:
            return self.seconds(2 * ceil(log2(R)) * num_bytes), self.meeting_seconds(R)
        return self.seconds(2 * (R - 1) / R * num_bytes), 2 * (R - 1) * self.latency_seconds


class ClockedGroup(ThreadGroup):
    """Values go to one rank or come from it, over a tree: every clock is at the latest then."""

    def __init__(self, rank: int, barrier: ValueBarrier, links: VirtualLinks) -> None:
        super().__init__(rank, barrier)
        self._links = links

    def exchange(self, value: T) -> list[T]:
        values: list[tuple[T, float]]
        with self._links.paused():
            values = super().exchange((value, self._links.clock))
        latest = max(clock for _, clock in values)
        self._links.clock = latest + self._links.speed.meeting_seconds(self.size) / 2
        return [each for each, _ in values]


class VirtualLinks(ThreadLinks):
    """A rank runs while it holds the baton, of which there is one, and its clock counts that time.

        send      leaves = max(own clock, end of the last send) + bytes / bandwidth
        receive   own clock = max(own clock, leaves + latency)
        gather    own clock = max of all clocks + latency ceil(log2 of the ranks), as a broadcast
        sum       from its last vector on as `LinkSpeed.sum_seconds`

    To each neighbor, and to all peers together, a rank sends one message at a time.

    The clocks therefore show what K ranks of this speed would need, even if this machine is busy:
    with one thread for each rank they count processor time, with more or on a GPU real time.
    """

    name, clocked = "virtual", True
    settings = frozenset({"gigabits_per_second", "latency_microseconds"})

    def __init__(
        self, number: int, team: ThreadTeam, speed: LinkSpeed, baton: threading.Lock, threads: int
    ) -> None:
        super().__init__(number, team)
        self.speed, self._baton = speed, baton
        alone = threads == 1 and not torch.cuda.is_available()
        self._timer: Callable[[], float] = thread_time if alone else perf_counter
        self.clock = self._begun = 0.0
        self._free = {-1: 0.0, 1: 0.0, 0: 0.0}
        """When the connection to the previous block, the next one and the peers is free again."""
        self._message_seconds = 0.0

    def _group(self, rank: int, barrier: ValueBarrier) -> ThreadGroup:
        return ClockedGroup(rank, barrier, self)

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        threads, (blocks, replicas) = torch.get_num_threads(), start.grid
        speed = LinkSpeed.of(start.settings)
        return run_virtual(blocks, program, speed, threads, replicas, cls)[0]

    def now(self) -> float:
        return self.clock + self._timer() - self._begun

    def epoch(self) -> float:
        """That of all ranks: their clocks begin together, though they run in turn."""
        return self._team.begun

    def count_nothing_here(self, message_seconds: float) -> None:
        """Count no time of this machine from now on, but `work` and messages alone.

        A message costs each of its two ranks `message_seconds` beside its way.
        """
        self._timer = lambda: 0.0
        self._begun, self._message_seconds = 0.0, message_seconds

    def work(self, seconds: float) -> None:
        """Count work that would be done elsewhere, and is not done here."""
        self.clock += seconds

    def run(self, program: Program[T]) -> T:
        with self._baton:
            self._begun = self._timer()
            return program(self)

    def _send(self, number: int, tensor: Tensor) -> None:
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self.work(self._message_seconds)
        way = number - self.place.number if self.place.in_chain(number) else 0
        self._put(number, (tensor, self._leaves(way, tensor.nbytes) + self.speed.latency_seconds))

    def _leaves(self, way: int, num_bytes: float) -> float:
        """When bytes that are sent now have left."""
        self._free[way] = max(self.now(), self._free[way]) + self.speed.seconds(num_bytes)
        return self._free[way]

    def _receive(self, number: int) -> Tensor:
        tensor: Tensor
        with self.paused():
            tensor, arrival = self._take(number)
        self.clock = max(self.clock, arrival) + self._message_seconds
        return tensor

    def _total(self, shared: SharedSum) -> tuple[Tensor, float]:
        with self.paused():  # the vectors would be added up on their way, by all ranks together
            total, begun = super()._total(shared)
        self._summed(begun, total.nbytes)
        return total, begun

    def _summed(self, begun: float, num_bytes: int) -> None:
        """Let the clock go on to the end of a sum that has begun when the last vector was there."""
        travels, latency = self.speed.sum_seconds(num_bytes, self.place.replicas)
        self._free[0] = max(begun, self._free[0]) + travels
        self.clock = max(self.clock, self._free[0] + latency)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other ranks run, while this rank's clock stands still."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.clock = self.now()
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()
            self._begun = self._timer()


def run_virtual(
    blocks: int,
    program: Program[T],
    speed: LinkSpeed | None = None,
    intra_op_threads: int = 1,
    replicas: int = 1,
    links: Callable[..., VirtualLinks] = VirtualLinks,
) -> list[T]:
    """Run `program` on a grid of ranks in turn, each on its own clock; results by place."""
    baton = threading.Lock()

    def make(number: int, team: ThreadTeam) -> Any:
        return links(number, team, speed or LinkSpeed(), baton, intra_op_threads)

    return run_threads(blocks, program, intra_op_threads, make, replicas)
