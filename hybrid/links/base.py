"""The base of all links: sends and receives by neighbor and replica, counters, agreement."""

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
from hybrid.solvers.peers import Sum

T = TypeVar("T")
Program = Callable[["RankLinks"], T]


@dataclass
class Traffic:
    """Traffic over one rank's links. Waiting is the time spent inside blocking calls."""

    bytes_sent: dict[str, int] = field(
        default_factory=lambda: {"next": 0, "previous": 0, "peers": 0}
    )
    waiting_seconds: dict[str, float] = field(
        default_factory=lambda: {"next": 0.0, "previous": 0.0, "peers": 0.0, "everyone": 0.0}
    )

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent.values())

    @property
    def total_waiting(self) -> float:
        return sum(self.waiting_seconds.values())


@dataclass(frozen=True)
class Start:
    """The grid, device and communicator on which links start a program."""

    grid: Grid
    settings: LinkSettings = field(default_factory=LinkSettings)
    device: torch.device | None = None
    """The device of this process's blocks; None: the CPU."""
    side_by_side: Arrangement = "chain"
    comm: Any = None
    """The `Communicator` of the ranks that a launcher started; None without a launcher."""

    @classmethod
    def of(cls, comm: Any, replicas: int = 1) -> "Start":
        """Start on all ranks of a communicator, divided into `replicas` chains."""
        return cls(Grid(comm.size // replicas, replicas), comm=comm)


class RankLinks(ABC):
    """One rank's links; implements `hybrid.solvers.Links`. `rank` and `size` count blocks.

    Links of another package derive from it or a subclass, have a `name`, and are registered by an
    entry point.
    """

    name: ClassVar[str] = ""
    in_one_process: ClassVar[bool] = True
    """Whether all ranks are threads of this process; otherwise a launcher starts processes."""
    over_mpi: ClassVar[bool] = False
    """Whether ranks need an MPI communicator."""
    clocked = False
    """Whether the clock is simulated: the work of one thread per rank, over a simulated network."""
    collective_above: ClassVar[float] = inf
    """Replicas above which an exchange of known formats is one collective instead of messages."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The [links] settings that these links read, besides `kind`."""
    tensors_by = ""
    """`way` of these links."""
    gpus = 1
    """GPUs that the threads of this process are on."""
    peers_share_gpu = False
    """Whether some replicas are threads on one GPU, whose backward passes torch runs in turn."""

    def __init__(self, place: GridPlace, grid: RankGroup, chain: RankGroup) -> None:
        self.place = place
        self.rank, self.size = place.block, place.blocks
        self._grid, self._chain = grid, chain
        self.peers = PeerLinks(self)
        self.traffic = Traffic()
        self.watch: Callable[[str, float, float], None] | None = None
        """Called after every send and wait with its name, and its start and end by `now`."""
        self._sent: Counter[int] = Counter()
        """Messages sent to each rank, by number as in `_send`."""
        self._received: Counter[int] = Counter()
        """Messages received from each rank, likewise."""
        self.wait: tuple[float, str] | None = None
        """The start, by `now`, of the current wait, and the ranks it waits for."""

    @classmethod
    def way(cls, start: Start) -> str:
        """Describe how tensors travel between processes; empty within one."""
        return ""

    @classmethod
    @abstractmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run the program on every rank; return the result of this process's first rank."""

    def run(self, program: Program[T]) -> T:
        return program(self)

    def close(self) -> None:  # noqa: B027
        """Free communicators and buffers, and drop messages under way. All ranks call it."""

    def now(self) -> float:
        return perf_counter()

    def set_speed(self, speed: float) -> None:  # noqa: B027
        """Let a simulated clock show a machine that is `speed` times as fast as this one."""

    def epoch(self) -> float:
        """Return the time of day, in seconds, at which this rank's clock was 0."""
        return time() - self.now()

    def to_next(self, tensor: Tensor) -> None:
        self.send_to("next", self.place.number + 1, tensor)

    def to_previous(self, tensor: Tensor) -> None:
        self.send_to("previous", self.place.number - 1, tensor)

    def from_previous(self) -> Tensor:
        """Wait for the next tensor from the previous block."""
        with self.waiting("previous"):
            return self.next_from(self.place.number - 1)

    def from_next(self) -> Tensor:
        """Wait for the next tensor from the next block."""
        with self.waiting("next"):
            return self.next_from(self.place.number + 1)

    def to_block(self, block: int, tensor: Tensor) -> None:
        """Send a tensor to any block, on a lane that is not ordered with messages to neighbors."""
        self.send_to("peers", self._second_lane(block), tensor)

    def from_block(self, block: int) -> Tensor:
        """Wait for the next tensor that a block has sent by `to_block`."""
        with self.waiting("peers"):
            return self.next_from(self._second_lane(block))

    def meet(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Connect blocks that need not be neighbors; each of them calls it."""

    def _second_lane(self, block: int) -> int:
        """Return the number of a block's rank on the second lane, see `_send`."""
        return self.place.count + self.place.replica * self.size + block

    def drop(self) -> None:
        """Receive and discard messages under way. All ranks call it at the same point.

        When a run fails, some ranks may have sent more than others have received.
        """
        here, count = self.place.number, self.place.count
        for number, sent in enumerate(self.all_gather_grid(dict(self._sent))):
            with self.waiting("everyone"):
                for lane in (0, count):
                    while self._received[number + lane] < sent.get(here + lane, 0):
                        self.next_from(number + lane)
        self.peers.forget()

    def all_gather(self, value: T) -> list[T]:
        """Gather the (small) value of every block of this replica, in order."""
        with self.waiting("everyone"):
            return self._chain.allgather(value)

    def all_gather_grid(self, value: T) -> list[T]:
        """Gather the (small) value of every rank of the grid, by place number."""
        with self.waiting("everyone"):
            return self._grid.allgather(value)

    def gather(self, value: T, at: int = 0) -> list[T] | None:
        """Gather the values of the grid's ranks at one place; the other ranks get None."""
        with self.waiting("everyone"):
            return self._grid.gather(value, at)

    def broadcast(self, value: T, at: int = 0) -> T:
        """Send the value of the rank at one place to every rank of the grid."""
        with self.waiting("everyone"):
            return self._grid.bcast(value, at)

    def first_of(self, value: T | None) -> T | None:
        """Return, on every rank of the grid, the first value that is not None."""
        with self.waiting("everyone"):
            return self._grid.first_of(value)

    @property
    def everyone(self) -> RankGroup:
        """The ranks of the grid, by place number; for use within `waiting`."""
        return self._grid

    def agree(self, value: T) -> list[T]:
        """Send the values of the first replica's blocks to every rank of the grid."""
        return self.broadcast((self.gather(value) or [])[: self.size])

    def agreement(self) -> AbstractContextManager[None]:
        """Return an `agreement` of all ranks of the grid."""
        return agreement(self.first_of)

    @abstractmethod
    def flush(self) -> None:
        """Wait until every tensor sent to neighbors has left."""

    @abstractmethod
    def _send(self, number: int, tensor: Tensor) -> None:
        """Send to the rank of that place number, in order.

        Numbers from the rank count on are a second lane to the same ranks, ordered separately.
        """

    @abstractmethod
    def _receive(self, number: int) -> Tensor:
        """Receive from the rank of that place number, in order."""

    @abstractmethod
    def sum_of_peers(self, vector: Tensor) -> Sum:
        """Begin the sum of the peers' vectors."""

    def exchange_of_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        """Begin an all-to-all: send `pieces[r]` to replica r, receive a tensor like `expected[r]`.

        Only links with a finite `collective_above` need it.
        """
        raise NotImplementedError

    def expect(self, number: int, like: Tensor) -> None:  # noqa: B027
        """Post a receive, if possible, for the next tensor of this format from that rank."""

    def _before_wait(self, side: str) -> None:  # noqa: B027
        """Send pending messages first: the rank waited for may need them."""

    def send_to(self, side: str, number: int, tensor: Tensor) -> None:
        """Send a tensor and count its bytes."""
        self.traffic.bytes_sent[side] += tensor.nbytes
        self._sent[number] += 1
        start = self.now()
        self._send(number, tensor)
        if self.watch is not None:
            self.watch(f"send: {side}", start, self.now())

    def next_from(self, number: int) -> Tensor:
        """Receive a tensor, inside `waiting`, and count the message."""
        self._received[number] += 1
        return self._receive(number)

    @contextmanager
    def waiting(self, side: str) -> Iterator[None]:
        """Count the body's time as waiting."""
        start = self.now()
        self.wait = start, self._describe(side)
        try:
            self._before_wait(side)
            yield
        finally:
            self.wait = None
            end = self.now()
            self.traffic.waiting_seconds[side] += end - start
            if self.watch is not None:
                self.watch(f"wait: {side}", start, end)

    def _describe(self, side: str) -> str:
        """Name the ranks of a side for an error message."""
        if side in ("next", "previous"):
            return str(replace(self.place, block=self.rank + (1 if side == "next" else -1)))
        return "all ranks" if side == "everyone" else "another block or replica"


class PeerLinks:
    """Links to the ranks that own the same block, one in each replica.

    They implement `hybrid.solvers.peers.Peers`: all peers begin the same exchanges in the same
    order, and may finish them in any order.
    """

    def __init__(self, links: RankLinks) -> None:
        place = links.place
        self.replica, self.replicas = place.replica, place.replicas
        self._links, self._numbers = links, place.peers
        self._awaited: list[deque[list[Tensor]]] = [deque() for _ in self._numbers]
        """By replica, the lists that its next tensors are appended to, one each."""

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Send `pieces[r]` to replica r; calling the result waits for all pieces, by replica.

        If `expected[r]` has the format of replica r's piece, the exchange may be one collective.
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
                    while not arrivals[r]:  # the first tensor may belong to an earlier exchange
                        self._awaited[r].popleft().append(links.next_from(number))
            here = pieces[self.replica].device  # messages arrive on the block's
            return [tensor.to(here) for (tensor,) in arrivals]

        return finish_messages

    def sum(self, vector: Tensor) -> Sum:
        """Begin the sum of all replicas' vectors.

        All replicas get the same bits. The links choose the order of the terms.
        """
        begun = self._links.sum_of_peers(vector)
        sent = 2 * vector.nbytes * (self.replicas - 1) // self.replicas
        return Sum(self._counted(begun.finish, sent), begun.ready)

    def _counted(self, finish: Callable[[], T], sent: int) -> Callable[[], T]:
        """Count a collective's bytes, and the time until it finishes."""
        self._links.traffic.bytes_sent["peers"] += sent

        def wait() -> T:
            with self._links.waiting("peers"):
                return finish()

        return wait

    def forget(self) -> None:
        """Expect no more tensors of earlier exchanges, which `RankLinks.drop` has discarded."""
        for arrivals in self._awaited:
            arrivals.clear()
