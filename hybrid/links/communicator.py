"""All ranks of a job that a launcher has started, and how they exchange small values."""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread, Timer
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid.errors import PeerError, given_by, reason

if TYPE_CHECKING:
    from hybrid.links.base import RankLinks


T = TypeVar("T")

FOR_EVER = timedelta(days=30)
"""Of a message that another rank may take hours for; `links.timeout` watches over waits."""
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
"""Lets gloo connect two ranks when they first exchange a message, not all ranks of a group."""
WAIT_SECONDS = 1800.0
"""A rank that has waited so long ends its job, unless links.timeout is set."""
LOOPBACK = "127.0.0.1"
_ABORTED = "hybrid/aborted"


class Communicator(ABC):
    """What this package asks of MPI or of torch.distributed about a job's ranks.

    Its methods are collective, unless they say otherwise: every rank calls them in one order.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T, root: int = 0) -> list[T] | None:
        """The (small) values of all ranks, in order, on rank `root`; None on the others."""

    def allgather(self, value: T) -> list[T]:
        """The (small) values of all ranks, in order."""
        return self.bcast(self.gather(value) or [])

    @abstractmethod
    def bcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks, and leave the cores to those that still work."""

    @abstractmethod
    def host_ranks(self) -> list[int]:
        """The ranks of this rank's host, in order."""

    @abstractmethod
    def abort(self, status: int) -> None:
        """End this rank, and with it the job; not collective."""

    def is_aborted(self) -> bool:
        """Whether another rank is known to have called `abort`; not collective."""
        return False

    def close(self) -> None:  # noqa: B027
        """Give back what belongs to it."""


class MpiCommunicator(Communicator):
    """The ranks of a communicator of mpi4py, which is `mpi`."""

    def __init__(self, mpi: Any) -> None:
        self.mpi, self.rank, self.size = mpi, mpi.rank, mpi.size

    def gather(self, value: T, root: int = 0) -> list[T] | None:
        everyone: list[T] | None = self.mpi.gather(value, root)
        return everyone

    def bcast(self, value: T, root: int = 0) -> T:
        theirs: T = self.mpi.bcast(value, root)
        return theirs

    def barrier(self) -> None:
        request = self.mpi.Ibarrier()
        while not request.Test():
            sleep(0.001)

    def host_ranks(self) -> list[int]:
        from mpi4py import MPI

        host = self.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        ranks: list[int] = host.allgather(self.rank)
        host.Free()
        return ranks

    def abort(self, status: int) -> None:
        self.mpi.Abort(status)


class TorchCommunicator(Communicator):
    """The ranks of torch's default process group, over a gloo group of this package's own.

    No message of a script's meets one of this package. A group has threads, which end with its last
    reference, and abort a process that ends while one of them frees a tensor. Who imports parts of
    torch keeps the default group for ever; this one ends when it is closed.
    """

    def __init__(self, store: Any = None, rank: int = -1, size: int = -1) -> None:
        """Make the default process group of the ranks that meet at `store`, unless there is one."""
        import torch.distributed as dist

        from hybrid.links import values

        os.environ.setdefault(LAZY_CONNECTIONS, "1")
        self._dist: Any = dist
        self._values = values
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            with lost_ranks():
                dist.init_process_group(
                    _backends(), store=store, rank=rank, world_size=size, timeout=FOR_EVER
                )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=FOR_EVER, group_desc="hybrid")
        self._store: Any = dist.distributed_c10d._get_default_store() if store is None else store

    def gather(self, value: T, root: int = 0) -> list[T] | None:
        with lost_ranks():
            return self._values.gather(value, self._group, root)

    def bcast(self, value: T, root: int = 0) -> T:
        with lost_ranks():
            theirs: T = self._values.broadcast(value, self._group, root)
        return theirs

    def barrier(self) -> None:
        with lost_ranks():
            self._dist.barrier(self._group)

    def host_ranks(self) -> list[int]:
        names = self.allgather(socket.gethostname())
        return [rank for rank, name in enumerate(names) if name == names[self.rank]]

    def abort(self, status: int) -> None:
        """End this rank; its launcher then ends the others."""
        with suppress(RuntimeError):
            self._store.set(_ABORTED, "")
        sys.stderr.flush()
        os._exit(status)

    def is_aborted(self) -> bool:
        try:
            return bool(self._store.check([_ABORTED]))
        except RuntimeError:  # the store has ended with the first rank, or with the launcher
            return True

    def close(self) -> None:
        """All ranks call it, after which torch has no default process group but a script's own."""
        group, self._group = self._group, None
        if group is not None and self._dist.is_initialized():
            self._dist.destroy_process_group(group)
            del group
            if self._is_ours:
                self._dist.destroy_process_group()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Within it what torch.distributed raises when a rank has ended is a PeerError."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        again = given_by("--resume", "resume=True")
        raise PeerError(f"another rank has ended; go on with {again}") from error


def local_store(port: int = 0) -> Any:
    """A store of torch that only processes of this host can reach; others listen to everybody."""
    import torch.distributed

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        port = server.getsockname()[1]
        descriptor = server.detach()  # the store closes it
    dist: Any = torch.distributed
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def stay_local() -> None:
    """Let gloo listen to this host alone, unless it has been told where."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())


def _backends() -> str:
    import torch
    import torch.distributed as dist

    by_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if by_nccl else "gloo"


@contextmanager
def waits_limited(links: RankLinks, comm: Communicator, timeout: float | None) -> Iterator[None]:
    """Within it the job ends when this rank has waited `timeout` seconds for another; 0: never."""
    ended, seconds = Event(), limit_of_waits(timeout)
    if seconds:
        Thread(target=_watch, args=(links, comm, seconds, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def limit_of_waits(timeout: float | None) -> float:
    """The seconds of links.timeout, which is None where it is not set; 0: no limit."""
    return WAIT_SECONDS if timeout is None else timeout


@contextmanager
def start_limited(comm: Communicator, timeout: float | None) -> Iterator[None]:
    """Within it the ranks begin together what all have to call; as `waits_limited`."""
    seconds = limit_of_waits(timeout)
    error = TimeoutError(
        f"it has waited for the other ranks for {seconds:g} s (links.timeout): call fit and "
        "evaluate on every rank, in one order"
    )
    timer = Timer(seconds + min(comm.rank, 10), abort, (comm, error))
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _watch(links: RankLinks, comm: Communicator, timeout: float, ended: Event) -> None:
    """End the job when this rank has waited too long: another rank, or its host, is stuck."""
    seen = goes_on = links.now()
    while not ended.wait(min(1.0, timeout / 4)):
        before, seen = seen, links.now()
        if seen - before > timeout / 2:
            goes_on = seen  # this rank was suspended itself
        since = links.waits_since
        # a second more for each rank: the first to speak ends the others
        if since is not None and seen - max(since, goes_on) > timeout + min(links.place.number, 10):
            waited = f"it has waited for {links.awaited} for {timeout:g} s (links.timeout)"
            again = given_by("--resume", "resume=True")
            remedy = f"find out why that rank is stuck, then go on with {again}"
            abort(comm, TimeoutError(f"{waited}: {remedy}"))


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
