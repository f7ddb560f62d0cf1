"""Groups of ranks: exchange of small values, messages of bytes, and the end of a job."""

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
    """Ranks that exchange small values. All of them call the same methods in the same order."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T, root: int = 0) -> list[T] | None:
        """Return the values of all ranks, in order, on rank `root`; None on the others."""

    @abstractmethod
    def bcast(self, value: T, root: int = 0) -> T:
        """Return the value of rank `root`."""

    def allgather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        return self.bcast(self.gather(value) or [])

    def first_of(self, value: T | None) -> T | None:
        """Return the first rank's value that is not None."""
        return self.bcast(next((v for v in self.gather(value) or () if v is not None), None))


class Transfer(Protocol):
    """A message or a collective that has begun."""

    def wait(self) -> None:
        """Wait until its memory may be used. Raises PeerError if another rank has ended."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def cancel(self) -> None:
        """Cancel a receive for which no message will come."""
        ...


class Communicator(RankGroup):
    """Ranks that are processes: the interface of links to a message library.

    A transport is a subclass of this class and one of `hybrid.links.posted.PostedLinks`.
    """

    @abstractmethod
    def split(
        self, groups: Sequence[Sequence[int]], timeout: float | None, on_device: bool = False
    ) -> Communicator:
        """Split the ranks into groups, ordered as listed; return this rank's group.

        The library may give up a wait after `timeout` (links.timeout). Messages and collectives
        use host memory, or the ranks' devices if `on_device`.
        """

    @abstractmethod
    def isend(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to send bytes (n,)."""

    @abstractmethod
    def irecv(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to receive bytes (n,)."""

    @abstractmethod
    def all_reduce(self, vector: Tensor) -> tuple[Tensor, Transfer]:
        """Begin to sum all ranks' vectors, with equal bits everywhere; return the sum's memory."""

    @abstractmethod
    def all_to_all(
        self, memory: Tensor, sizes: list[int], expected: list[int]
    ) -> tuple[Tensor, Transfer]:
        """Begin to send `sizes[r]` bytes to rank r and receive `expected[r]`; return the latter."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks, leaving the cores to those that still work."""

    def host_ranks(self) -> list[int]:
        names = self.allgather(gethostname())
        return [rank for rank, name in enumerate(names) if name == names[self.rank]]

    def abort(self, status: int) -> None:
        """End this process; its launcher then ends the others. Not collective."""
        sys.stderr.flush()
        os._exit(status)

    def is_aborted(self) -> bool:
        """Whether another rank is known to have called `abort`. Not collective."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free the communicator's resources."""


@contextmanager
def agreement(first_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """Run the body; if it fails on any rank, raise AgreedError with the first reason on all.

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
    """Return links.timeout in seconds, or its default if it is None; 0: no limit."""
    return WAIT_SECONDS if timeout is None else timeout


@contextmanager
def start_limited(comm: Communicator, timeout: float | None) -> Iterator[None]:
    """End the job, as `waits_limited` does, if other ranks do not reach this collective start."""
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
    """End the job if the body waits longer than `timeout` seconds for another rank; 0: never.

    `wait` returns the start of the current wait and the ranks it waits for.
    """
    ended, seconds = Event(), limit_of_waits(timeout)

    def watch() -> None:
        now = awake = perf_counter()
        # one second more for each rank: the first to report ends the others
        limit = seconds + min(comm.rank, 10)
        while not ended.wait(min(1.0, seconds / 4)):
            before, now = now, perf_counter()
            if now - before > limit / 2:
                awake = now  # this rank itself was suspended
            if (waiting := wait()) and now - max(waiting[0], awake) > limit:
                text = f"it has waited for {waiting[1]} for {seconds:g} s (links.timeout): {remedy}"
                abort(comm, TimeoutError(text))

    if seconds:
        Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def abort(comm: Communicator, error: BaseException) -> None:
    """Print the reason once, and end every rank of the job."""
    # if all ranks fail at the same point, the first to report ends the others, which takes time
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
