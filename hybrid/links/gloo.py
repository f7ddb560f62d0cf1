"""Links between processes by torch.distributed: gloo carries tensors in host memory over TCP."""

import fcntl
import os
import socket
import struct
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
from hybrid.links.communicator import Communicator, Transfer, agreement, limit_of_waits
from hybrid.links.posted import PostedLinks

T = TypeVar("T")
dist: Any = torch.distributed
"""Typed as Any: some builds of torch lack some of its names."""
FOR_EVER = timedelta(days=30)
"""gloo's timeout: another rank may take hours to send, and `links.timeout` limits waits."""
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
"""Lets gloo connect two ranks at their first message, instead of all ranks of a group at once."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface of a host that gloo uses; unset: that of the host's name."""
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux: the address of a network interface."""
_ABORTED = "hybrid/aborted"


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raise PeerError for the errors of torch.distributed when another rank has ended."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        again = given_by("--resume", "resume=True")
        raise PeerError(f"another rank has ended; go on with {again}") from error


class TorchTransfer:
    """A `Work` of torch.distributed."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait on the host for gloo, on the current stream for NCCL."""
        with lost_ranks():
            self._work.wait()

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def cancel(self) -> None:
        """Do nothing: a receive of gloo ends with its group."""


class GlooSend(TorchTransfer):
    """A send of gloo, which does not report completion: a thread waits for sends in order."""

    def __init__(self, work: Any, waiter: ThreadPoolExecutor) -> None:
        super().__init__(work)
        self._end: Future[None] = waiter.submit(super().wait)

    def wait(self) -> None:
        self._end.result()

    def done(self) -> bool:
        return self._end.done()


class TorchGroup(Communicator):
    """Ranks of torch's default process group, over a separate gloo or NCCL group.

    A group's threads end with its last reference. A process that ends while one of them frees a
    tensor is aborted.
    """

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self._group, self._members = group, members
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        self._order = [dist.get_group_rank(group, member) for member in members]
        self._is_gloo = dist.get_backend(group) == "gloo"
        self._waiter = ThreadPoolExecutor(1, "gloo sends")

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
    ) -> "TorchGroup":
        seconds = limit_of_waits(timeout)
        # links.timeout ends the job a minute earlier, with a reason
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
    """All ranks of torch's default process group, over a separate gloo group.

    So messages of a script and of this package never mix. A default group that this class creates
    is destroyed by `close`: parts of torch, once imported, would keep it alive forever.
    """

    def __init__(self, store: Any = None, rank: int = -1, size: int = -1) -> None:
        """Create the default process group, with its ranks meeting at `store`, if there is none."""
        os.environ.setdefault(LAZY_CONNECTIONS, "1")
        self._owns_default_group = not dist.is_initialized()
        if self._owns_default_group:
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
        """Destroy the groups created here; a script's default group stays. All ranks call it."""
        super().close()
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()


def local_store(port: int = 0) -> Any:
    """Create a TCPStore that only this host can reach; by default it listens on all interfaces."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        port = server.getsockname()[1]
        descriptor = server.detach()  # the store closes it
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def stay_local() -> None:
    """Let gloo listen on the loopback interface alone, unless the user has chosen one."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault(INTERFACE, names.pop())


def own_address() -> str:
    """Return this host's address for others: of GLOO_SOCKET_IFNAME if that is set, or its name.

    gloo takes the same. ValueError if others cannot reach it.
    """
    host = socket.gethostname()
    if name := os.environ.get(INTERFACE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.partition(",")[0].encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            except OSError as error:
                raise ValueError(f"{INTERFACE} is {name!r} on {host}: {error.strerror}") from None
        return socket.inet_ntoa(answer[20:24])
    address = "no address"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    if address[0].isdigit() and not address.startswith("127."):
        return host
    raise ValueError(
        f"the name {host} of this host resolves to {address}, where ranks of other hosts cannot "
        f"reach it: set {INTERFACE} to its network interface (ip -br address lists them), by "
        f"export before torchrun or by mpirun -x {INTERFACE}"
    )


def join_by_torch(comm: Communicator) -> TorchCommunicator:
    """Create torch's default process group on ranks that MPI has joined. All ranks call it."""
    address, port, store = LOOPBACK, 0, None
    is_local = len(comm.host_ranks()) == comm.size
    if is_local:
        stay_local()
    else:
        with agreement(comm.first_of):
            address = own_address()
    own = address
    if comm.rank == 0 and not dist.is_initialized():
        if is_local:
            store = local_store()
        else:  # it listens on all interfaces
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = store.port
    address, port = comm.bcast((address, port))
    if port and store is None:
        host = LOOPBACK if address == own else address
        store = dist.TCPStore(host, port)
    return TorchCommunicator(store, comm.rank, comm.size)


class GlooLinks(PostedLinks):
    """Links over gloo, in their own process groups."""

    name: ClassVar[str] = "torch"
    library, polls = "gloo", False
    settings: ClassVar[frozenset[str]] = frozenset({"device", "timeout"})

    def __init__(self, start: Start) -> None:
        self._torch_comm: TorchCommunicator | None = None
        super().__init__(start)
        here = self.place.number
        near = {n for n in (here - 1, here + 1) if self.place.in_chain(n)}
        self._connect({*near, *self.place.peers})

    def _transport(self, comm: Communicator) -> Communicator:
        if isinstance(comm, TorchCommunicator):
            return comm
        self._torch_comm = join_by_torch(comm)
        return self._torch_comm

    def _connect(self, numbers: set[int]) -> None:
        """Connect to some ranks; all ranks go through the pairs in the same order.

        gloo's first message between two ranks blocks until both have called it, which a rank
        inside a collective never does.
        """
        here, byte = self.place.number, torch.zeros(1, dtype=torch.uint8)
        for number in sorted(numbers - {here}, key=lambda n: sorted((here, n))):
            move = self._whole.isend if here < number else self._whole.irecv
            move(byte, number, 0).wait()

    def meet(self, blocks: Sequence[int]) -> None:
        first = self.place.replica * self.size
        near = {self.place.number - 1, self.place.number + 1}  # connected already
        self._connect({first + block for block in blocks} - near)

    def close(self) -> None:
        super().close()
        if self._torch_comm is not None:
            self._torch_comm.close()
