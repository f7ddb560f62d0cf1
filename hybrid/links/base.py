"""What threads and MPI links share: sends and receives by neighbor, counters, agreement."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hybrid.errors import AgreedError, one_line
from hybrid.ranks.grid import Arrangement, Grid, Place
from hybrid.settings.config import LinkSettings

T = TypeVar("T")
Program = Callable[["RankLinks"], T]

LOOKS_AGAIN = 2e-5
"""Seconds until one that waits for any of several looks for a message again."""


class PeerError(RuntimeError):
    """Another rank has failed; it tells the reason."""


@dataclass
class Traffic:
    """What went over one rank's links. Waiting is the time spent inside blocking calls."""

    bytes_sent: dict[str, int] = field(
        default_factory=lambda: {"next": 0, "previous": 0, "peers": 0}
    )
    waiting_seconds: dict[str, float] = field(
        default_factory=lambda: {"next": 0.0, "previous": 0.0, "peers": 0.0, "everyone": 0.0}
    )

    @property
    def total_bytes(self) -> int:
        """Bytes sent to neighbors and peers."""
        return sum(self.bytes_sent.values())

    @property
    def total_waiting(self) -> float:
        """Seconds spent waiting for anyone."""
        return sum(self.waiting_seconds.values())


@dataclass(frozen=True)
class Start:
    """What links start a program on."""

    grid: Grid
    settings: LinkSettings = field(default_factory=LinkSettings)
    device: torch.device | None = None
    """Of this process's blocks; None: the CPU."""
    side_by_side: Arrangement = "chain"
    comm: Any = None
    """The communicator of the ranks that a launcher started; None without a launcher."""
    local_rank: int = 0


class RankLinks(ABC):
    """One rank's links; implements `solvers.Links`. `rank` and `size` count blocks.

    A class of links of one's own derives from it, or from a class that does, has a `name`, and is
    made known by an entry point of the group "hybrid.links".
    """

    name: ClassVar[str] = ""
    in_one_process: ClassVar[bool] = True
    """Whether all ranks are in this process; else each is a process that a launcher started."""
    clocked = False
    """Whether its clock counts the work of one thread for each rank, over a network of settings."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The settings of [links] that have an effect, beside `kind`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank, self.size = place.block, place.blocks
        self.peers = Peers(self)
        self.traffic = Traffic()
        self.watch: Callable[[str, float, float], None] | None = None
        """Told of every wait: a name, and two readings of `perf_counter`."""
        self.waits_since: float | None = None
        """Since when, by `now`, it has waited for another rank; None while it does not."""

    @classmethod
    @abstractmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run the program on every rank; give the result of the first rank in this process."""

    def run(self, program: Program[T]) -> T:
        """Run this rank's program."""
        return program(self)

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        return perf_counter()

    def to_next(self, tensor: Tensor) -> None:
        """Send to the next block."""
        self._hand("next", self.place.number + 1, tensor)

    def to_previous(self, tensor: Tensor) -> None:
        """Send to the previous block."""
        self._hand("previous", self.place.number - 1, tensor)

    def from_previous(self) -> Tensor:
        """Wait for a tensor of the previous block."""
        with self.waiting("previous"):
            return self._receive(self.place.number - 1)

    def from_next(self) -> Tensor:
        """Wait for a tensor of the next block."""
        with self.waiting("next"):
            return self._receive(self.place.number + 1)

    def has_message(self, side: Literal["next", "previous"]) -> bool:
        """Whether a tensor of that neighbor has come."""
        return self._arrived(self.place.number + (1 if side == "next" else -1))

    def wait_any(self, *sides: Literal["next", "previous"]) -> Literal["next", "previous"]:
        """Wait until a tensor has come from one of them; which, the first if several have."""
        with self.waiting(sides[0]):
            while True:
                for side in sides:
                    if self.has_message(side):
                        return side
                sleep(LOOKS_AGAIN)

    def all_gather(self, value: T) -> list[T]:
        """The (small, picklable) value of every block of this replica, in order."""
        with self.waiting("everyone"):
            return self._all_gather(value, False)

    def everyone(self, value: T) -> list[T]:
        """The (small, picklable) value of every rank of the grid, by its place's number."""
        with self.waiting("everyone"):
            return self._all_gather(value, True)

    def agree(self, value: T) -> list[T]:
        """The values of the first replica's blocks, the same on every rank of the grid."""
        return self.everyone(value)[: self.size]

    @abstractmethod
    def flush(self) -> None:
        """Wait until every tensor sent to neighbors so far has left."""

    @abstractmethod
    def _send(self, number: int, tensor: Tensor) -> None:
        """To the rank at the place of that number, in order."""

    @abstractmethod
    def _receive(self, number: int) -> Tensor:
        """From the rank at the place of that number, in order."""

    @abstractmethod
    def _arrived(self, number: int) -> bool:
        """Whether a tensor of the rank at the place of that number has come."""

    @abstractmethod
    def _all_gather(self, value: T, grid: bool) -> list[T]:
        """Of the whole grid, or of this replica."""

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """All ranks get through the body, or all raise the first failing rank's reason.

        The body must not communicate.
        """
        reason: str | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            reason = one_line(error)
        reasons = self.everyone(reason)
        first = next((r for r in reasons if r is not None), None)
        if first is not None:
            raise AgreedError(first)

    def _hand(self, side: str, number: int, tensor: Tensor) -> None:
        """Send, and count what is sent."""
        self.traffic.bytes_sent[side] += tensor.numel() * tensor.element_size()
        start = self.now()
        self._send(number, tensor)
        if self.watch is not None:
            self.watch(f"send: {side}", start, self.now())

    @contextmanager
    def waiting(self, side: str) -> Iterator[None]:
        """Count the time of the body as waiting."""
        self.waits_since = start = self.now()
        try:
            yield
        finally:
            self.waits_since = None
            end = self.now()
            self.traffic.waiting_seconds[side] += end - start
            if self.watch is not None:
                self.watch(f"wait: {side}", start, end)


class Peers:
    """The ranks that own the same block, one a replica; implements `solvers.sync.base.Peers`.

    All of them begin the same exchanges in the same order, and may end them in any.
    """

    def __init__(self, links: RankLinks) -> None:
        place = links.place
        self.replica, self.replicas = place.replica, place.replicas
        self._links = links
        self._numbers = place.peers
        self._begun = 0
        self._arrived = [0] * self.replicas
        self._early: dict[tuple[int, int], Tensor] = {}

    def exchange(self, pieces: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send `pieces[r]` to replica r; the call of what it gives waits for theirs, in order."""
        exchange, self._begun = self._begun, self._begun + 1
        for r, number in enumerate(self._numbers):
            if r != self.replica:
                self._links._hand("peers", number, pieces[r])

        def arrived() -> list[Tensor]:
            with self._links.waiting("peers"):
                replicas = range(self.replicas)
                return [
                    pieces[r] if r == self.replica else self._take(r, exchange) for r in replicas
                ]

        return arrived

    def drop(self) -> None:
        """Receive all that is under way, and forget it; all ranks call it at the same point.

        Some may have failed before they began as many exchanges as others.
        """
        if self.replicas == 1:
            return
        everyone = self._links.everyone(self._begun)
        begun = [everyone[number] for number in self._numbers]
        for r, number in enumerate(self._numbers):
            for _ in range(self._arrived[r], begun[r]) if r != self.replica else ():
                self._links._receive(number)
        self._begun = max(begun)
        self._arrived = [self._begun] * self.replicas
        self._early.clear()

    def _take(self, replica: int, exchange: int) -> Tensor:
        """What a replica has sent in an exchange; what comes before is put by."""
        while self._arrived[replica] <= exchange:
            tensor = self._links._receive(self._numbers[replica])
            self._early[replica, self._arrived[replica]] = tensor
            self._arrived[replica] += 1
        return self._early.pop((replica, exchange))
