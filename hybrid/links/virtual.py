"""Links with a logical clock for each rank: blocks run in turn, timed as if on K machines."""

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
"""Vectors of at least this size Open MPI sums in a ring."""


@dataclass(frozen=True)
class LinkSpeed:
    """Rate and latency of a link between two ranks, one message at a time each way."""

    bytes_per_second: float = 10e9 / 8
    """The rate of every rank; ranks of one host do not share it."""
    latency_seconds: float = 10e-6

    @classmethod
    def of(cls, links: LinkSettings) -> "LinkSpeed":
        rate = links.gigabits_per_second * 1e9 / 8
        return cls(rate, links.latency_microseconds * 1e-6)

    def seconds(self, num_bytes: float) -> float:
        """Return the time to send bytes, without the latency."""
        return num_bytes / self.bytes_per_second

    def meeting_seconds(self, ranks: int) -> float:
        """Return the time of an all-gather of small values: 2 latency ceil(log2 n)."""
        return 2 * ceil(log2(ranks)) * self.latency_seconds

    def sum_seconds(self, num_bytes: float, replicas: int) -> tuple[float, float]:
        """Return the transfer time and the latency of an all-reduce of B bytes over R replicas.

            ring      2 (R-1)/R B / rate                 2 (R-1) latency
            tree      2 ceil(log2 R) B / rate            2 ceil(log2 R) latency

        MPI uses a tree below 64 KiB.
        """
        R = replicas
        if num_bytes < _RING_BYTES:
            return self.seconds(2 * ceil(log2(R)) * num_bytes), self.meeting_seconds(R)
        return self.seconds(2 * (R - 1) / R * num_bytes), 2 * (R - 1) * self.latency_seconds


class ClockedGroup(ThreadGroup):
    """Gathers and broadcasts over a tree, which advance every clock to the latest one."""

    def __init__(self, rank: int, barrier: ValueBarrier, links: "VirtualLinks") -> None:
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
    """Links of ranks that run in turn: the rank that holds the baton runs, and its clock counts.

        send      leaves = max(clock, end of the last send) + bytes / bandwidth
        receive   clock = max(clock, leaves + latency)
        gather    clock = max of all clocks + latency ceil(log2 of the ranks), as a broadcast
        sum       from its last vector on as `LinkSpeed.sum_seconds`

    A rank sends one message at a time to each neighbor, and one to all peers together.

    So the clocks show the time that K ranks of this speed would need, even if this machine is busy:
    with one thread per rank they count processor time, with more or on a GPU wall-clock time. Of
    a block's machine that has another speed (split.speeds), work takes 1 / speed as long.
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
        self.clock = self._timer_start = 0.0
        self.pace = 1.0
        """Seconds of this clock for a second of work on this machine."""
        self._free = {-1: 0.0, 1: 0.0, 0: 0.0}
        """When the links to the previous block, the next one and the peers are free."""
        self._message_seconds = 0.0

    def _group(self, rank: int, barrier: ValueBarrier) -> ThreadGroup:
        return ClockedGroup(rank, barrier, self)

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        threads, (blocks, replicas) = torch.get_num_threads(), start.grid
        speed = LinkSpeed.of(start.settings)
        return run_virtual(blocks, program, speed, threads, replicas, cls)[0]

    def now(self) -> float:
        return self.clock + self.pace * (self._timer() - self._timer_start)

    def set_speed(self, speed: float) -> None:
        self.clock, self._timer_start = self.now(), self._timer()
        self.pace = 1 / speed

    def epoch(self) -> float:
        """Return the common start of all clocks, which begin together though ranks run in turn."""
        return self._team.start_time

    def ignore_machine_time(self, message_seconds: float) -> None:
        """From now on count only `work` and messages, not the time of this machine.

        A message costs its sender and its receiver `message_seconds` each, besides the transfer.
        """
        self._timer = lambda: 0.0
        self._timer_start, self._message_seconds = 0.0, message_seconds

    def work(self, seconds: float) -> None:
        """Advance the clock by simulated work."""
        self.clock += seconds

    def run(self, program: Program[T]) -> T:
        with self._baton:
            self._timer_start = self._timer()
            return program(self)

    def _send(self, number: int, tensor: Tensor) -> None:
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self.work(self._message_seconds)
        way = number - self.place.number if self.place.in_chain(number) else 0
        self._put(number, (tensor, self._leaves(way, tensor.nbytes) + self.speed.latency_seconds))

    def _leaves(self, way: int, num_bytes: float) -> float:
        """Return the time at which bytes sent now have left."""
        self._free[way] = max(self.now(), self._free[way]) + self.speed.seconds(num_bytes)
        return self._free[way]

    def _receive(self, number: int) -> Tensor:
        tensor: Tensor
        with self.paused():
            tensor, arrival = self._take(number)
        self.clock = max(self.clock, arrival) + self._message_seconds
        return tensor

    def _total(self, shared: SharedSum) -> tuple[Tensor, float]:
        with self.paused():  # real ranks would share the additions, in transit
            total, start = super()._total(shared)
        self.advance_past_sum(start, total.nbytes)
        return total, start

    def advance_past_sum(self, start: float, num_bytes: int) -> None:
        """Advance the clock to the end of a sum whose last vector came at `start`."""
        transfer, latency = self.speed.sum_seconds(num_bytes, self.place.replicas)
        self._free[0] = max(start, self._free[0]) + transfer
        self.clock = max(self.clock, self._free[0] + latency)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other ranks run while this rank's clock stands still."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.clock = self.now()
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()
            self._timer_start = self._timer()


def run_virtual(
    blocks: int,
    program: Program[T],
    speed: LinkSpeed | None = None,
    intra_op_threads: int = 1,
    replicas: int = 1,
    links: Callable[..., VirtualLinks] = VirtualLinks,
) -> list[T]:
    """Run `program` on a grid of ranks in turn, each on its own clock; return results by place."""
    baton = threading.Lock()

    def make(number: int, team: ThreadTeam) -> Any:
        return links(number, team, speed or LinkSpeed(), baton, intra_op_threads)

    return run_threads(blocks, program, intra_op_threads, make, replicas)
