"""Groups of ranks: how they exchange small values, send bytes, and end when one is lost."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from socket import gethostname
from threading import Event, Thread
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Protocol, TypeVar

from hybrid.errors import AgreedError, PeerError, one_line, reason

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
WAIT_SECONDS = 1800.0
"""A rank that has waited this long ends its job, unless links.timeout is set."""


class RankGroup(ABC):
    """Some ranks that exchange small values. All of them call a method, in one order."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T, root: int = 0) -> list[T] | None:
        """The values of all ranks, in order, on rank `root`; None on the others."""

    @abstractmethod
    def bcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`."""

    def allgather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        return self.bcast(self.gather(value) or [])

    def first_of(self, value: T | None) -> T | None:
        """The first value of a rank that has one; None without any."""
        return self.bcast(next((v for v in self.gather(value) or () if v is not None), None))


class Transfer(Protocol):
    """A message or a collective that has begun."""

    def wait(self) -> None:
        """Wait until its memory may be used; PeerError if another rank has ended."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def cancel(self) -> None:
        """Give up a receive that no message will come for."""
        ...


class Communicator(RankGroup):
    """Ranks that are processes: all that links ask of a library of messages.

    A transport is a subclass of this class and one of `hybrid.links.posted.PostedLinks`.
    """

    @abstractmethod
    def split(
        self, groups: Sequence[Sequence[int]], timeout: float | None, on_device: bool = False
    ) -> Communicator:
        """This rank's of some groups, whose members are numbered in the order given.

        The library may give up a wait after `timeout` (links.timeout). The memory of messages and
        collectives is the host's, or that of the ranks' devices if `on_device`.
        """

    @abstractmethod
    def isend(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to send bytes (n,)."""

    @abstractmethod
    def irecv(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to receive bytes (n,)."""

    @abstractmethod
    def all_reduce(self, vector: Tensor) -> tuple[Tensor, Transfer]:
        """Begin to sum all ranks' vectors, with the same bits everywhere; the sum's memory."""

    @abstractmethod
    def all_to_all(
        self, memory: Tensor, sizes: list[int], expected: list[int]
    ) -> tuple[Tensor, Transfer]:
        """Begin to send `sizes[r]` bytes to rank r and to receive `expected[r]`; their memory."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks, and leave the cores to those that still work."""

    def host_ranks(self) -> list[int]:
        """The ranks of this rank's host, in order."""
        names = self.allgather(gethostname())
        return [rank for rank, name in enumerate(names) if name == names[self.rank]]

    def abort(self, status: int) -> None:
        """End this rank, after which its launcher ends the others; not collective."""
        sys.stderr.flush()
        os._exit(status)

    def is_aborted(self) -> bool:
        """Whether another rank is known to have called `abort`; not collective."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give back what belongs to it."""


@contextmanager
def agreement(first_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """The body succeeds on all ranks, or all raise AgreedError with the first failure's reason.

    The body must not communicate.
    """
    failure: str | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        failure = one_line(error)
    first = first_of(failure)
    if first is not None:
        raise AgreedError(first)


def limit_of_waits(timeout: float | None) -> float:
    """The seconds of links.timeout, which is None where it is not set; 0: no limit."""
    return WAIT_SECONDS if timeout is None else timeout


@contextmanager
def start_limited(comm: Communicator, timeout: float | None) -> Iterator[None]:
    """Within it the ranks begin together what all have to call; as `waits_limited`."""
    wait = perf_counter(), "the other ranks"
    remedy = "call fit and evaluate on every rank, in one order"
    with waits_limited(comm, timeout, lambda: wait, remedy):
        yield


@contextmanager
def waits_limited(
    comm: Communicator,
    timeout: float | None,
    wait: Callable[[], tuple[float, str] | None],
    remedy: str,
) -> Iterator[None]:
    """Within it the job ends when this rank has waited `timeout` seconds for another; 0: never.

    `wait` gives when the present wait began, and for whom.
    """
    ended, seconds = Event(), limit_of_waits(timeout)
    if seconds:
        Thread(target=_watch, args=(comm, seconds, wait, remedy, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    comm: Communicator,
    timeout: float,
    wait: Callable[[], tuple[float, str] | None],
    remedy: str,
    ended: Event,
) -> None:
    """End the job when this rank has waited too long: another rank, or its host, is stuck."""
    seen = awake = perf_counter()
    # a second more for each rank: the first to speak ends the others
    limit = timeout + min(comm.rank, 10)
    while not ended.wait(min(1.0, timeout / 4)):
        before, seen = seen, perf_counter()
        if seen - before > limit / 2:
            awake = seen  # this rank was suspended itself
        if (waiting := wait()) and seen - max(waiting[0], awake) > limit:
            text = f"it has waited for {waiting[1]} for {timeout:g} s (links.timeout): {remedy}"
            abort(comm, TimeoutError(text))


def abort(comm: Communicator, error: BaseException) -> None:
    """Print the reason once, and end every rank of the job."""
    # where all ranks fail at the same point, the first to speak ends the others, which takes time
    lost = isinstance(error, PeerError)
    sleep(min(1.0 + 0.2 * comm.rank, 3.0) if comm.rank else 2.0 * lost)
    try:
        if comm.is_aborted():
            return  # another rank has given its reason
        interrupted = isinstance(error, KeyboardInterrupt)
        why = "interrupted" if interrupted else f"rank {comm.rank}: {reason(error)}"
        print(f"hybrid: error: {why}", file=sys.stderr, flush=True)
    finally:  # even if stderr is closed
        comm.abort(1)
