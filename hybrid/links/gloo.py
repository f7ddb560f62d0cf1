"""Links between processes by gloo, which carries tensors in host memory over TCP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed
from torch import Tensor

from hybrid.errors import PeerError
from hybrid.links import values
from hybrid.links.base import Start
from hybrid.links.communicator import (
    FOR_EVER,
    LOOPBACK,
    Communicator,
    TorchCommunicator,
    limit_of_waits,
    local_store,
    lost_ranks,
    stay_local,
)
from hybrid.links.posted import PostedLinks, Request
from hybrid.links.staging import joined_bytes, sizes_in_bytes, split_bytes, staging

T = TypeVar("T")
dist: Any = torch.distributed
"""Not all of its names are there where torch was built without them."""


class GlooLinks(PostedLinks):
    """Messages are gloo's, in a process group of these links' own, which connects who has messages.

    Sums over peers are all-reduces of a group of the block's replicas.

    A thread waits for what leaves, because gloo's sends cannot be asked whether they have.
    """

    name: ClassVar[str] = "torch"
    settings: ClassVar[frozenset[str]] = frozenset({"device", "timeout"})

    def __init__(self, start: Start) -> None:
        self._device = start.device or torch.device("cpu")
        super().__init__(start, staging(self._device))
        self._is_joined_by_torch = isinstance(start.comm, TorchCommunicator)
        if not self._is_joined_by_torch:
            self._joined = join_by_torch(start.comm)
        self._limit = _limit(start.settings.timeout)
        self._group = dist.new_group(backend="gloo", timeout=self._limit, group_desc="hybrid links")
        chains = torch.tensor(self._ranks).view(start.grid.replicas, start.grid.blocks)
        self._peers_group = self._subgroup(chains.T.tolist())
        self._chain_group = self._subgroup(chains.tolist())
        self._leaving = Waiter("messages that leave")
        self._connect()

    def _connect(self) -> None:
        """Connect with the neighbors and peers, every rank in one order of all pairs.

        gloo's first message between two ranks waits until both have one for the other, which a rank
        in a collective never has.
        """
        own = self.place.number
        near = {n for n in (own - 1, own + 1) if self.place.in_chain(n)}
        self._connect_with({*near, *self.place.peers})

    def meet(self, blocks: Sequence[int]) -> None:
        first = self.place.replica * self.size
        near = {self.place.number - 1, self.place.number + 1}  # which it is connected with
        self._connect_with({first + block for block in blocks} - near)

    def _connect_with(self, numbers: set[int]) -> None:
        own, byte = self.place.number, torch.zeros(1, dtype=torch.uint8)
        for number in sorted(numbers - {own}, key=lambda n: sorted((own, n))):
            move = dist.send if own < number else dist.recv
            with lost_ranks():
                move(byte, self._ranks[number], self._group)

    def _subgroup(self, groups: list[list[int]]) -> Any:
        """This rank's of some groups of ranks."""
        backend = "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl"
        return dist.new_subgroups_by_enumeration(groups, self._limit, backend)[0]

    def _isend(self, memory: Tensor, number: int, tag: int) -> Request:
        with lost_ranks():
            work = dist.isend(memory, self._ranks[number], self._group, tag)
        return GlooRequest(work).watched_by(self._leaving)

    def _irecv(self, memory: Tensor, number: int, tag: int) -> Request:
        with lost_ranks():
            return GlooRequest(dist.irecv(memory, self._ranks[number], self._group, tag))

    def _release(self) -> None:
        self._leaving.end()
        groups = [self._group, self._peers_group, self._chain_group]
        # a group ends its threads with its last reference: at the process's end they would abort it
        del self._group, self._peers_group, self._chain_group
        while groups:
            dist.destroy_process_group(groups.pop())
        if not self._is_joined_by_torch:
            self._joined.close()

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        self._send_staged(wait=True)
        place = self.place
        whole = grid or place.replicas == 1
        with lost_ranks():
            everyone: Any = values.gather(value, self._group if whole else self._chain_group)
        return [everyone[rank] for rank in self._ranks] if whole else everyone

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        summed = self._for_engine(vector)
        with lost_ranks():
            work = dist.all_reduce(summed, group=self._peers_group, async_op=True)

        def finish() -> Tensor:
            TorchRequest(work).wait()
            return self._of_engine(summed)

        return finish

    def _exchange_with_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        sent, sizes = self._for_engine(joined_bytes(pieces)), sizes_in_bytes(expected)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
        with lost_ranks():
            work = dist.all_to_all_single(
                received, sent, sizes, sizes_in_bytes(pieces), self._peers_group, async_op=True
            )

        def finish() -> list[Tensor]:
            TorchRequest(work).wait()
            return split_bytes(self._of_engine(received), expected)

        return finish

    def _for_engine(self, tensor: Tensor) -> Tensor:
        """A tensor where the group of peers reads it."""
        outgoing = self._staging.outgoing(tensor)
        outgoing.wait()
        return outgoing.memory

    def _of_engine(self, tensor: Tensor) -> Tensor:
        """The tensor on the block's device."""
        return self._staging.arrived(tensor)


def _limit(timeout: float | None) -> timedelta:
    """After which torch gives up a wait: a minute after `links.timeout`, which names the reason."""
    seconds = limit_of_waits(timeout)
    return timedelta(seconds=seconds + 60) if seconds else FOR_EVER


def join_by_torch(comm: Communicator) -> TorchCommunicator:
    """torch's default process group of ranks that MPI has joined; all ranks call it."""
    address, port, server = LOOPBACK, 0, None
    is_local = len(comm.host_ranks()) == comm.size
    if is_local:
        stay_local()
    if comm.rank == 0 and not dist.is_initialized():
        if is_local:
            server = local_store()
        else:  # it listens on all interfaces
            address = socket.gethostname()
            server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = server.port
    address, port = comm.bcast((address, port))
    store: Any = server
    if port and server is None:
        host = LOOPBACK if address == socket.gethostname() else address
        store = dist.TCPStore(host, port)
    return TorchCommunicator(store, comm.rank, comm.size)


class TorchRequest:
    """A work of torch.distributed that can tell when it is over: one of NCCL's."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """The host waits for a work of gloo, the current stream for one of NCCL."""
        with lost_ranks():
            self._work.wait()

    def done(self) -> bool:
        return bool(self._work.is_completed())


class GlooRequest(TorchRequest):
    """A message of gloo, which cannot be asked: a thread has to wait in place of the rank."""

    def __init__(self, work: Any) -> None:
        super().__init__(work)
        self._over: Event | None = None
        self._error: PeerError | None = None

    def watched_by(self, waiter: Waiter) -> GlooRequest:
        """Let a thread wait for it, so that it can be asked."""
        if self._over is None:
            self._over = Event()
            waiter.queue.put(self)
        return self

    def wait(self) -> None:
        if self._over is None:
            super().wait()
            return
        self._over.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._over is not None and self._over.is_set()

    def finish(self) -> None:
        """Wait, on the thread."""
        assert self._over is not None
        try:
            super().wait()
        except PeerError as error:
            self._error = error
        self._over.set()


class Waiter:
    """A thread that waits for requests in their order, until `end`.

    A process that ends while a thread is inside gloo is aborted: links end theirs when they close.
    """

    def __init__(self, name: str) -> None:
        self.queue: SimpleQueue[GlooRequest | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return when the thread has ended, after all that it waits for."""
        self.queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self.queue.get()) is not None:
            request.finish()
