"""What threads and MPI links share: sends and receives by neighbor, counters, agreement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hybrid.errors import AgreedError, one_line
from hybrid.links.grid import Arrangement, Grid, Place
from hybrid.settings.config import LinkSettings

T = TypeVar("T")
Program = Callable[["RankLinks"], T]


@contextmanager
def agreement(first_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """The body succeeds on all ranks, or all raise AgreedError with the first failure's reason.

    The body must not communicate.
    """
    reason: str | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        reason = one_line(error)
    first = first_of(reason)
    if first is not None:
        raise AgreedError(first)


@dataclass
class Traffic:
    """What went over one rank's links. Waiting is the time spent inside blocking calls."""

    bytes_sent: dict[str, int] = field(
        default_factory=lambda: {"next": 0, "previous": 0, "peers": 0}
    )
    waiting_seconds: dict[str, float] = field(
        default_factory=lambda: {"next": 0.0, "previous": 0.0, "peers": 0.0, "everyone": 0.0}
    )

    calls: dict[str, int] = field(default_factory=lambda: {"next": 0, "previous": 0, "peers": 0})
    """Messages sent one by one, and sums or exchanges that were begun in the links' engine."""

    def count(self, side: str, num_bytes: int) -> None:
        """Count a message, or a call of the engine."""
        self.calls[side] += 1
        self.bytes_sent[side] += num_bytes

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
    """The `Communicator` of the ranks that a launcher started; None without a launcher."""

    @classmethod
    def of(cls, comm: Any, replicas: int = 1) -> Start:
        """Of all ranks of a communicator, with so many replicas."""
        return cls(Grid(comm.size // replicas, replicas), comm=comm)


class RankLinks(ABC):
    """One rank's links; implements `hybrid.solvers.Links`. `rank` and `size` count blocks.

    A class of links of one's own derives from it, or from a class that does, has a `name`, and is
    made known by an entry point of the group "hybrid.links".
    """

    name: ClassVar[str] = ""
    in_one_process: ClassVar[bool] = True
    """Whether all ranks are in this process; else each is a process that a launcher started."""
    over_mpi: ClassVar[bool] = False
    """Whether its ranks need a communicator of MPI's own."""
    clocked = False
    """Whether its clock counts the work of one thread for each rank, over a network of settings."""
    fewest_by_engine: ClassVar[int] = 8
    """Peers up to which a rank sends them messages one by one, which costs less for a few."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The settings of [links] that have an effect, beside `kind`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank, self.size = place.block, place.blocks
        self.peers = Peers(self)
        self.traffic = Traffic()
        self.watch: Callable[[str, float, float], None] | None = None
        """Called after every send and every wait with its name, its start and its end by `now`."""
        self._sent_beside: dict[int, int] = {}
        """Messages so far to blocks that need not be neighbors, by block; and from them."""
        self._received_beside: dict[int, int] = {}
        self.waits_since: float | None = None
        """When, by `now`, its present wait for another rank began; None while it does not wait."""
        self.awaited = ""
        """For whom it waits."""

    @classmethod
    @abstractmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run the program on every rank; give the result of the first rank in this process."""

    def run(self, program: Program[T]) -> T:
        """Run this rank's program."""
        return program(self)

    def close(self) -> None:
        """Give back what belongs to them; all ranks call it when no message is under way."""
        self.flush()

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        return perf_counter()

    def epoch(self) -> float:
        """The time of day, in seconds, at which this rank's clock was at 0."""
        return time() - self.now()

    def to_next(self, tensor: Tensor) -> None:
        """Send a tensor to the next block."""
        self._send_counted("next", self.place.number + 1, tensor)

    def to_previous(self, tensor: Tensor) -> None:
        """Send a tensor to the previous block."""
        self._send_counted("previous", self.place.number - 1, tensor)

    def from_previous(self) -> Tensor:
        """Wait for a tensor of the previous block."""
        with self.waiting("previous"):
            return self._receive(self.place.number - 1)

    def from_next(self) -> Tensor:
        """Wait for a tensor of the next block."""
        with self.waiting("next"):
            return self._receive(self.place.number + 1)

    def to_block(self, block: int, tensor: Tensor) -> None:
        """Send a tensor to any block, beside what goes to neighbors: it keeps no order with it."""
        self._sent_beside[block] = self._sent_beside.get(block, 0) + 1
        self._send_counted("peers", self._beside(block), tensor)

    def from_block(self, block: int) -> Tensor:
        """Wait for the next tensor that a block has sent so."""
        self._received_beside[block] = self._received_beside.get(block, 0) + 1
        with self.waiting("peers"):
            return self._receive(self._beside(block))

    def meet(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Prepare messages between blocks that need not be neighbors; each of them calls it."""

    def _beside(self, block: int) -> int:
        """The number of a block's rank, beyond those that stand for neighbors and peers."""
        return self.place.count + self.place.replica * self.size + block

    def drop(self) -> None:
        """Receive and discard what is under way between peers, and beside neighbors.

        All ranks call it at the same point: some may have begun fewer exchanges than others.
        """
        self.peers.drop()
        everyone = self.everyone(self._sent_beside)
        for block in range(self.size):
            sent = everyone[self.place.replica * self.size + block].get(self.rank, 0)
            for _ in range(self._received_beside.get(block, 0), sent):
                self.from_block(block)

    def all_gather(self, value: T) -> list[T]:
        """The (small) value of every block of this replica, in order."""
        with self.waiting("everyone"):
            return self._all_gather(value, False)

    def everyone(self, value: T) -> list[T]:
        """The (small) value of every rank of the grid, by its place's number."""
        with self.waiting("everyone"):
            return self._all_gather(value, True)

    def gather(self, value: T, at: int = 0) -> list[T] | None:
        """The values of all ranks of the grid, on the rank at that place alone; elsewhere None."""
        with self.waiting("everyone"):
            return self._gather(value, at)

    def broadcast(self, value: T, at: int = 0) -> T:
        """The value of the rank at that place, on every rank of the grid."""
        with self.waiting("everyone"):
            return self._broadcast(value, at)

    def first_of(self, value: T | None) -> T | None:
        """The first value of a rank that has one, on every rank of the grid; None without any."""
        everyone = self.gather(value)
        return self.broadcast(next((v for v in everyone or () if v is not None), None))

    def agree(self, value: T) -> list[T]:
        """The values of the first replica's blocks, the same on every rank of the grid."""
        everyone = self.gather(value)
        return self.broadcast([] if everyone is None else everyone[: self.size])

    @abstractmethod
    def flush(self) -> None:
        """Wait until every tensor sent to neighbors so far has left."""

    @abstractmethod
    def _send(self, number: int, tensor: Tensor) -> None:
        """To the rank at the place of that number, in order.

        A number from the count of ranks on stands for the same ranks, in an order of its own.
        """

    @abstractmethod
    def _receive(self, number: int) -> Tensor:
        """From the rank at the place of that number, in order."""

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor] | None:
        """Begin the engine's own sum of the peers' vectors; None where there is no engine."""
        return None

    def _exchange_with_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]] | None:
        """Begin the engine's own exchange of `pieces[r]` to replica r; None where there is none.

        `expected[r]` has the format of what replica r sends.
        """
        return None

    def _expect(self, number: int, like: Tensor) -> None:  # noqa: B027
        """The next tensor of its format comes from the rank at that place: it may be received."""

    @abstractmethod
    def _all_gather(self, value: T, grid: bool) -> list[T]:
        """The values of all ranks of the grid, or of those of this replica."""

    def _gather(self, value: T, at: int) -> list[T] | None:
        """Within one process nothing is copied; links between processes send to one rank alone."""
        everyone = self._all_gather(value, True)
        return everyone if self.place.number == at else None

    def _broadcast(self, value: T, at: int) -> T:
        return self._all_gather(value, True)[at]

    def agreement(self) -> AbstractContextManager[None]:
        """`agreement` of all ranks of the grid."""
        return agreement(self.first_of)

    def _send_counted(self, side: str, number: int, tensor: Tensor) -> None:
        """Send, and count what is sent."""
        self.traffic.count(side, num_bytes(tensor))
        start = self.now()
        self._send(number, tensor)
        if self.watch is not None:
            self.watch(f"send: {side}", start, self.now())

    @contextmanager
    def waiting(self, side: str) -> Iterator[None]:
        """Count the time of the body as waiting."""
        self.awaited = self._named(side)
        self.waits_since = start = self.now()
        try:
            yield
        finally:
            self.waits_since = None
            end = self.now()
            self.traffic.waiting_seconds[side] += end - start
            if self.watch is not None:
                self.watch(f"wait: {side}", start, end)

    def _named(self, side: str) -> str:
        """Those of a side, in words."""
        of = f" of replica {self.place.replica}" if self.place.replicas > 1 else ""
        if side in ("next", "previous"):
            return f"block {self.rank + (1 if side == 'next' else -1)}{of}"
        return "all ranks" if side == "everyone" else "another block or replica"


def num_bytes(tensor: Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()


class Peers:
    """The ranks that own the same block, one in each replica (`hybrid.solvers.sync.base.Peers`).

    All of them begin the same exchanges in the same order, and may end them in any order.
    """

    def __init__(self, links: RankLinks) -> None:
        place = links.place
        self.replica, self.replicas = place.replica, place.replicas
        self._links = links
        self._numbers = place.peers
        self._begun = 0
        self._arrived = [0] * self.replicas
        self._early: dict[tuple[int, int], Tensor] = {}

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Send `pieces[r]` to replica r; calling the result waits for all pieces, by replica.

        Where `expected[r]` has the format of what replica r sends, the links' engine may do it.
        """
        if expected and self.replicas > self._links.fewest_by_engine:
            finish = self._links._exchange_with_peers(pieces, expected)
            if finish is not None:
                sent = sum(map(num_bytes, pieces)) - num_bytes(pieces[self.replica])
                return self._waited(finish, sent)
        exchange, self._begun = self._begun, self._begun + 1
        for r, number in enumerate(self._numbers):
            if r != self.replica:
                if expected:
                    self._links._expect(number, expected[r])
                self._links._send_counted("peers", number, pieces[r])

        def arrived() -> list[Tensor]:
            with self._links.waiting("peers"):
                replicas = range(self.replicas)
                return [
                    pieces[r] if r == self.replica else self._take(r, exchange) for r in replicas
                ]

        return arrived

    def sum(self, vector: Tensor) -> Callable[[], Tensor] | None:
        """Begin the engine's own sum of all replicas' vectors; the call of the result waits for it.

        All have the same bits. None where the links have no engine.
        """
        finish = self._links._sum_of_peers(vector)
        if finish is None:
            return None
        return self._waited(finish, 2 * num_bytes(vector) * (self.replicas - 1) // self.replicas)

    def _waited(self, finish: Callable[[], T], sent: int) -> Callable[[], T]:
        """Count a call of the engine: its bytes, and the time until it is over."""
        self._links.traffic.count("peers", sent)

        def finished() -> T:
            with self._links.waiting("peers"):
                return finish()

        return finished

    def drop(self) -> None:
        """Receive and discard all messages under way; all ranks call it at the same point.

        Some ranks may have begun fewer exchanges than others when they failed.
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
        """The tensor that a replica has sent in an exchange; earlier arrivals are stored."""
        while self._arrived[replica] <= exchange:
            tensor = self._links._receive(self._numbers[replica])
            self._early[replica, self._arrived[replica]] = tensor
            self._arrived[replica] += 1
        return self._early.pop((replica, exchange))
