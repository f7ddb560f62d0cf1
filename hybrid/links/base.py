"""What all links share: sends and receives by neighbor and by replica, counters, agreement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter, time
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hybrid.links.communicator import RankGroup, agreement
from hybrid.links.grid import Arrangement, Grid, GridPlace
from hybrid.settings.config import LinkSettings

T = TypeVar("T")
Program = Callable[["RankLinks"], T]


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
    """The `Communicator` of the ranks that a launcher started; None without a launcher."""

    @classmethod
    def of(cls, comm: Any, replicas: int = 1) -> Start:
        """Of all ranks of a communicator, in chains of one replica each."""
        return cls(Grid(comm.size // replicas, replicas), comm=comm)


class RankLinks(ABC):
    """One rank's links; implements `hybrid.solvers.Links`. `rank` and `size` count blocks.

    Links of another package derive from it or a subclass, have a `name`, and are registered by an
    entry point.
    """

    name: ClassVar[str] = ""
    in_one_process: ClassVar[bool] = True
    """Whether all ranks are in this process; else each is a process that a launcher started."""
    over_mpi: ClassVar[bool] = False
    """Whether its ranks need a communicator of MPI's own."""
    clocked = False
    """Whether its clock counts the work of one thread for each rank, over a network of settings."""
    collective_above: ClassVar[float] = inf
    """Replicas above which an exchange of known formats is one collective, not messages."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The settings of [links] that have an effect, beside `kind`."""

    def __init__(self, place: GridPlace, grid: RankGroup, chain: RankGroup) -> None:
        self.place = place
        self.rank, self.size = place.block, place.blocks
        self._grid, self._chain = grid, chain
        self.peers = PeerLinks(self)
        self.traffic = Traffic()
        self.watch: Callable[[str, float, float], None] | None = None
        """Called after every send and every wait with its name, its start and its end by `now`."""
        self._sent: Counter[int] = Counter()
        """Messages so far to each rank, by number as in `_send`; and from them."""
        self._received: Counter[int] = Counter()
        self.wait: tuple[float, str] | None = None
        """When, by `now`, its present wait for others began, and who they are."""

    @classmethod
    @abstractmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run the program on every rank; give the result of the first rank in this process."""

    def run(self, program: Program[T]) -> T:
        """Run this rank's program."""
        return program(self)

    def close(self) -> None:  # noqa: B027
        """Give back what belongs to them. All ranks call it; what is under way is dropped."""

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        return perf_counter()

    def epoch(self) -> float:
        """The time of day, in seconds, at which this rank's clock was at 0."""
        return time() - self.now()

    def to_next(self, tensor: Tensor) -> None:
        """Send a tensor to the next block."""
        self.send_to("next", self.place.number + 1, tensor)

    def to_previous(self, tensor: Tensor) -> None:
        """Send a tensor to the previous block."""
        self.send_to("previous", self.place.number - 1, tensor)

    def from_previous(self) -> Tensor:
        """Wait for a tensor of the previous block."""
        with self.waiting("previous"):
            return self.next_from(self.place.number - 1)

    def from_next(self) -> Tensor:
        """Wait for a tensor of the next block."""
        with self.waiting("next"):
            return self.next_from(self.place.number + 1)

    def to_block(self, block: int, tensor: Tensor) -> None:
        """Send a tensor to any block, beside what goes to neighbors: it keeps no order with it."""
        self.send_to("peers", self._beside(block), tensor)

    def from_block(self, block: int) -> Tensor:
        """Wait for the next tensor that a block has sent by `to_block`."""
        with self.waiting("peers"):
            return self.next_from(self._beside(block))

    def meet(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Prepare messages between blocks that need not be neighbors; each of them calls it."""

    def _beside(self, block: int) -> int:
        """The number of a block's rank, beyond those that stand for neighbors and peers."""
        return self.place.count + self.place.replica * self.size + block

    def drop(self) -> None:
        """Receive and discard what is under way. All ranks call it at the same point.

        When a run fails, some ranks may have sent more than others have asked for.
        """
        here, count = self.place.number, self.place.count
        for number, sent in enumerate(self.everyone(dict(self._sent))):
            with self.waiting("everyone"):
                for beside in (0, count):
                    while self._received[number + beside] < sent.get(here + beside, 0):
                        self.next_from(number + beside)
        self.peers.forget()

    def all_gather(self, value: T) -> list[T]:
        """The (small) value of every block of this replica, in order."""
        with self.waiting("everyone"):
            return self._chain.allgather(value)

    def everyone(self, value: T) -> list[T]:
        """The (small) value of every rank of the grid, by its place's number."""
        with self.waiting("everyone"):
            return self._grid.allgather(value)

    def gather(self, value: T, at: int = 0) -> list[T] | None:
        """The values of all ranks of the grid, on the rank at that place alone; elsewhere None."""
        with self.waiting("everyone"):
            return self._grid.gather(value, at)

    def broadcast(self, value: T, at: int = 0) -> T:
        """The value of the rank at that place, on every rank of the grid."""
        with self.waiting("everyone"):
            return self._grid.bcast(value, at)

    def first_of(self, value: T | None) -> T | None:
        """The first value of a rank that has one, on every rank of the grid; None without any."""
        with self.waiting("everyone"):
            return self._grid.first_of(value)

    def agree(self, value: T) -> list[T]:
        """The values of the first replica's blocks, the same on every rank of the grid."""
        return self.broadcast((self.gather(value) or [])[: self.size])

    def agreement(self) -> AbstractContextManager[None]:
        """`agreement` of all ranks of the grid."""
        return agreement(self.first_of)

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

    @abstractmethod
    def sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of the peers' vectors; the call of the result waits for it."""

    def exchange_of_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        """Begin a collective that sends `pieces[r]` to replica r, and gets one like `expected[r]`.

        Links whose `collective_above` is finite have it.
        """
        raise NotImplementedError

    def expect(self, number: int, like: Tensor) -> None:  # noqa: B027
        """The next tensor of its format comes from the rank at that place: it may be received."""

    def _before_wait(self) -> None:  # noqa: B027
        """Let all leave that others may need before they send what this rank waits for."""

    def send_to(self, side: str, number: int, tensor: Tensor) -> None:
        """Send, and count what is sent."""
        self.traffic.bytes_sent[side] += tensor.nbytes
        self._sent[number] += 1
        start = self.now()
        self._send(number, tensor)
        if self.watch is not None:
            self.watch(f"send: {side}", start, self.now())

    def next_from(self, number: int) -> Tensor:
        """Receive, inside of `waiting`, and count what is received."""
        self._received[number] += 1
        return self._receive(number)

    @contextmanager
    def waiting(self, side: str) -> Iterator[None]:
        """Count the time of the body as waiting."""
        start = self.now()
        self.wait = start, self._named(side)
        try:
            self._before_wait()
            yield
        finally:
            self.wait = None
            end = self.now()
            self.traffic.waiting_seconds[side] += end - start
            if self.watch is not None:
                self.watch(f"wait: {side}", start, end)

    def _named(self, side: str) -> str:
        """The ranks of a side, in words."""
        if side in ("next", "previous"):
            return str(replace(self.place, block=self.rank + (1 if side == "next" else -1)))
        return "all ranks" if side == "everyone" else "another block or replica"


class PeerLinks:
    """Links to the ranks that own the same block, one in each replica.

    It implements `hybrid.solvers.peers.Peers`: all of them begin the same exchanges in the same
    order, and may end them in any order.
    """

    def __init__(self, links: RankLinks) -> None:
        place = links.place
        self.replica, self.replicas = place.replica, place.replicas
        self._links, self._numbers = links, place.peers
        self._awaited: list[deque[list[Tensor]]] = [deque() for _ in self._numbers]
        """By replica, where its next tensors go: each into a list of its own."""

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Send `pieces[r]` to replica r; calling the result waits for all pieces, by replica.

        Where `expected[r]` has the format of what replica r sends, it may be one collective.
        """
        links = self._links
        if expected and self.replicas > links.collective_above:
            finish = links.exchange_of_peers(pieces, expected)
            sent = sum(piece.nbytes for piece in pieces) - pieces[self.replica].nbytes
            return self._counted(finish, sent)
        arrivals: list[list[Tensor]] = [[] for _ in pieces]
        for r, number in enumerate(self._numbers):
            if r == self.replica:
                arrivals[r].append(pieces[r])
                continue
            if expected:
                links.expect(number, expected[r])
            links.send_to("peers", number, pieces[r])
            self._awaited[r].append(arrivals[r])

        def finish_messages() -> list[Tensor]:
            with links.waiting("peers"):
                for r, number in enumerate(self._numbers):
                    while not arrivals[r]:  # what comes first may be of an earlier exchange
                        self._awaited[r].popleft().append(links.next_from(number))
            return [tensor for (tensor,) in arrivals]

        return finish_messages

    def sum(self, vector: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of all replicas' vectors; the call of the result waits for it.

        All have the same bits. The links choose the order of the terms.
        """
        finish = self._links.sum_of_peers(vector)
        return self._counted(finish, 2 * vector.nbytes * (self.replicas - 1) // self.replicas)

    def _counted(self, finish: Callable[[], T], sent: int) -> Callable[[], T]:
        """Count a collective: its bytes, and the time until it is over."""
        self._links.traffic.bytes_sent["peers"] += sent

        def finished() -> T:
            with self._links.waiting("peers"):
                return finish()

        return finished

    def forget(self) -> None:
        """Await nothing any more: all that was under way has been dropped."""
        for arrivals in self._awaited:
            arrivals.clear()
