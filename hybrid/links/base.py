"""What threads and MPI links share: counters, agreement, failure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from hybrid.errors import AgreedError, one_line

T = TypeVar("T")
Program = Callable[["RankLinks"], T]


class PeerError(RuntimeError):
    """Another rank has failed; it tells the reason."""


@dataclass
class Traffic:
    """What went over one rank's links. Waiting is the time spent inside blocking calls."""

    bytes_sent: dict[str, int] = field(default_factory=lambda: {"next": 0, "previous": 0})
    waiting_seconds: dict[str, float] = field(
        default_factory=lambda: {"next": 0.0, "previous": 0.0, "everyone": 0.0}
    )

    @property
    def total_bytes(self) -> int:
        """Bytes sent over both links."""
        return sum(self.bytes_sent.values())

    @property
    def total_waiting(self) -> float:
        """Seconds spent waiting for anyone."""
        return sum(self.waiting_seconds.values())


class RankLinks(ABC):
    """One rank's links; implements `solvers.Links`. `rank` and `size` count blocks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.watch: Callable[[str, float, float], None] | None = None
        """Told of every wait: a name, and two readings of `perf_counter`."""
        self.waits_since: float | None = None
        """Since when, by `now`, it has waited for another rank; None while it does not."""

    def run(self, program: Program[T]) -> T:
        """Run this rank's program."""
        return program(self)

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        return perf_counter()

    def to_next(self, tensor: Tensor) -> None:
        """Send to the next block."""
        self._count("next", tensor)
        self._send(self.rank + 1, tensor)

    def to_previous(self, tensor: Tensor) -> None:
        """Send to the previous block."""
        self._count("previous", tensor)
        self._send(self.rank - 1, tensor)

    def from_previous(self) -> Tensor:
        """Wait for a tensor of the previous block."""
        with self._waiting("previous"):
            return self._receive(self.rank - 1)

    def from_next(self) -> Tensor:
        """Wait for a tensor of the next block."""
        with self._waiting("next"):
            return self._receive(self.rank + 1)

    def all_gather(self, value: T) -> list[T]:
        """Everyone's (small, picklable) value, in rank order, on every rank."""
        with self._waiting("everyone"):
            return self._all_gather(value)

    @abstractmethod
    def flush(self) -> None:
        """Wait until every tensor sent so far has left."""

    @abstractmethod
    def _send(self, peer: int, tensor: Tensor) -> None: ...

    @abstractmethod
    def _receive(self, peer: int) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, value: T) -> list[T]: ...

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
        reasons = self.all_gather(reason)
        first = next((r for r in reasons if r is not None), None)
        if first is not None:
            raise AgreedError(first)

    def _count(self, side: str, tensor: Tensor) -> None:
        self.traffic.bytes_sent[side] += tensor.numel() * tensor.element_size()

    @contextmanager
    def _waiting(self, side: str) -> Iterator[None]:
        self.waits_since = start = self.now()
        try:
            yield
        finally:
            self.waits_since = None
            end = self.now()
            self.traffic.waiting_seconds[side] += end - start
            if self.watch is not None:
                self.watch(f"wait: {side}", start, end)
