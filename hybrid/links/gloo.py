"""Links between processes by torch.distributed: gloo carries tensors in host memory over TCP."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed
from torch import Tensor

from hybrid.errors import PeerError, given_by
from hybrid.links import values
from hybrid.links.base import Start
from hybrid.links.communicator import Communicator, Transfer, limit_of_waits
from hybrid.links.posted import PostedLinks

T = TypeVar("T")
dist: Any = torch.distributed
"""Not all of its names are there where torch was built without them."""
FOR_EVER = timedelta(days=30)
"""Of a message that another rank may take hours for; `links.timeout` watches over waits."""
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
"""Lets gloo connect two ranks when they first exchange a message, not all ranks of a group."""
LOOPBACK = "127.0.0.1"
_ABORTED = "hybrid/aborted"


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


class TorchTransfer:
    """A work of torch.distributed."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """The host waits for a work of gloo, the current stream for one of NCCL."""
        with lost_ranks():
            self._work.wait()

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def cancel(self) -> None:
        """A receive of gloo ends with its group."""


class GlooSend(TorchTransfer):
    """A message that gloo sends, which cannot be asked: a thread waits for it, in order."""

    def __init__(self, work: Any, waiter: ThreadPoolExecutor) -> None:
        super().__init__(work)
        self._end: Future[None] = waiter.submit(super().wait)

    def wait(self) -> None:
        self._end.result()

    def done(self) -> bool:
        return self._end.done()


class TorchGroup(Communicator):
    """Ranks of torch's default process group, over a group of their own: of gloo, or of NCCL.

    A group has threads, which end with its last reference, and abort a process that ends while one
    of them frees a tensor.
    """

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self._group, self._members = group, members
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        self._order = [dist.get_group_rank(group, member) for member in members]
        self._is_gloo = dist.get_backend(group) == "gloo"
        self._waiter = ThreadPoolExecutor(1, "messages that leave")

    def gather(self, value: T, root: int = 0) -> list[T] | None:
        message, group = values.encode(value), self._group
        with lost_ranks():
            sizes = list(torch.zeros(self.size, 1, dtype=torch.int64))
            dist.all_gather(sizes, torch.tensor([len(message)]), group)
            sent = torch.cat([message, message.new_zeros(int(max(sizes)) - len(message))])
            received = [torch.empty_like(sent) for _ in sizes] if self.rank == root else None
            dist.gather(sent, received, self._members[root], group)
        if received is None:
            return None
        return [values.decode(received[i][: sizes[i]]) for i in self._order]

    def bcast(self, value: T, root: int = 0) -> T:
        is_sent, member = self.rank == root, self._members[root]
        message = values.encode(value) if is_sent else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(message)])
        with lost_ranks():
            dist.broadcast(size, member, self._group)
            message = message if is_sent else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(message, member, self._group)
        received: T = value if is_sent else values.decode(message)
        return received

    def split(
        self, groups: Sequence[Sequence[int]], timeout: float | None, on_device: bool = False
    ) -> TorchGroup:
        seconds = limit_of_waits(timeout)
        # links.timeout itself ends the job a minute earlier, with its reason
        limit = timedelta(seconds=seconds + 60) if seconds else FOR_EVER
        backend = "nccl" if on_device and torch.cuda.is_available() else "gloo"
        members = [[self._members[rank] for rank in ranks] for ranks in groups]
        group, _ = dist.new_subgroups_by_enumeration(members, limit, backend)
        return TorchGroup(group, next(ranks for ranks in members if dist.get_rank() in ranks))

    def isend(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        with lost_ranks():
            work = dist.isend(memory, self._members[rank], self._group, tag)
        return GlooSend(work, self._waiter) if self._is_gloo else TorchTransfer(work)

    def irecv(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        with lost_ranks():
            return TorchTransfer(dist.irecv(memory, self._members[rank], self._group, tag))

    def all_reduce(self, vector: Tensor) -> tuple[Tensor, Transfer]:
        with lost_ranks():
            return vector, TorchTransfer(dist.all_reduce(vector, group=self._group, async_op=True))

    def all_to_all(
        self, memory: Tensor, sizes: list[int], expected: list[int]
    ) -> tuple[Tensor, Transfer]:
        received = memory.new_empty(sum(expected))
        with lost_ranks():
            work = dist.all_to_all_single(received, memory, expected, sizes, self._group, True)
        return received, TorchTransfer(work)

    def barrier(self) -> None:
        with lost_ranks():
            dist.barrier(self._group)

    def close(self) -> None:
        self._waiter.shutdown()  # a process that ends while a thread is inside gloo is aborted
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class TorchCommunicator(TorchGroup):
    """All ranks of torch's default process group, over a gloo group of this package's own.

    No message of a script's meets one of this package. Who imports parts of torch keeps the default
    group for ever; one that is made here ends when it is closed.
    """

    def __init__(self, store: Any = None, rank: int = -1, size: int = -1) -> None:
        """Make the default process group of the ranks that meet at `store`, unless there is one."""
        os.environ.setdefault(LAZY_CONNECTIONS, "1")
        self._is_made_here = not dist.is_initialized()
        if self._is_made_here:
            by_nccl = torch.cuda.is_available() and dist.is_nccl_available()
            backends = "cpu:gloo,cuda:nccl" if by_nccl else "gloo"
            with lost_ranks():
                dist.init_process_group(
                    backends, store=store, rank=rank, world_size=size, timeout=FOR_EVER
                )
        group = dist.new_group(backend="gloo", timeout=FOR_EVER, group_desc="hybrid")
        super().__init__(group, range(dist.get_world_size()))
        self._store: Any = dist.distributed_c10d._get_default_store() if store is None else store

    def abort(self, status: int) -> None:
        with suppress(RuntimeError):
            self._store.set(_ABORTED, "")
        super().abort(status)

    def is_aborted(self) -> bool:
        try:
            return bool(self._store.check([_ABORTED]))
        except RuntimeError:  # the store has ended with the first rank, or with the launcher
            return True

    def close(self) -> None:
        """All ranks call it, after which torch has no default process group but a script's own."""
        super().close()
        if self._is_made_here and dist.is_initialized():
            dist.destroy_process_group()


def local_store(port: int = 0) -> Any:
    """A store of torch that only processes of this host can reach; others listen to everybody."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        port = server.getsockname()[1]
        descriptor = server.detach()  # the store closes it
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def stay_local() -> None:
    """Let gloo listen to this host alone, unless it has been told where."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())


def join_by_torch(comm: Communicator) -> TorchCommunicator:
    """torch's default process group of ranks that MPI has joined; all ranks call it."""
    address, port, store = LOOPBACK, 0, None
    is_local = len(comm.host_ranks()) == comm.size
    if is_local:
        stay_local()
    if comm.rank == 0 and not dist.is_initialized():
        if is_local:
            store = local_store()
        else:  # it listens on all interfaces
            address = socket.gethostname()
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = store.port
    address, port = comm.bcast((address, port))
    if port and store is None:
        host = LOOPBACK if address == socket.gethostname() else address
        store = dist.TCPStore(host, port)
    return TorchCommunicator(store, comm.rank, comm.size)


class GlooLinks(PostedLinks):
    """Messages are gloo's, in process groups of these links' own."""

    name: ClassVar[str] = "torch"
    settings: ClassVar[frozenset[str]] = frozenset({"device", "timeout"})

    def __init__(self, start: Start) -> None:
        self._own_comm: TorchCommunicator | None = None
        super().__init__(start)
        here = self.place.number
        near = {n for n in (here - 1, here + 1) if self.place.in_chain(n)}
        self._connect({*near, *self.place.peers})

    def _joined(self, comm: Communicator) -> Communicator:
        if isinstance(comm, TorchCommunicator):
            return comm
        self._own_comm = join_by_torch(comm)
        return self._own_comm

    def _connect(self, numbers: set[int]) -> None:
        """Connect with some ranks, every rank in one order of all pairs.

        gloo's first message between two ranks waits until both have one for the other, which a rank
        in a collective never has.
        """
        here, byte = self.place.number, torch.zeros(1, dtype=torch.uint8)
        for number in sorted(numbers - {here}, key=lambda n: sorted((here, n))):
            move = self._whole.isend if here < number else self._whole.irecv
            move(byte, number, 0).wait()

    def meet(self, blocks: Sequence[int]) -> None:
        first = self.place.replica * self.size
        near = {self.place.number - 1, self.place.number + 1}  # which it is connected with
        self._connect({first + block for block in blocks} - near)

    def close(self) -> None:
        super().close()
        if self._own_comm is not None:
            self._own_comm.close()
