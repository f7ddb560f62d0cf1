"""Links over torch.distributed, for ranks of any launcher: gloo, and NCCL between GPUs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybrid.errors import AgreedError
from hybrid.links.base import Start
from hybrid.links.communicator import FOR_EVER, Communicator, TorchCommunicator, lost_ranks
from hybrid.links.ending import limit_of_waits
from hybrid.links.layout import (
    as_dense,
    joined_bytes,
    memory_of,
    room_for,
    sizes_in_bytes,
    split_bytes,
)
from hybrid.links.posted import Inbox, PostedLinks, Request
from hybrid.links.staging import staging
from hybrid.links.torch_requests import GlooRequest, TorchRequest, Waiter

T = TypeVar("T")
dist: Any = torch.distributed
"""Not all of its names are there where torch was built without them."""


class TorchLinks(PostedLinks):
    """Messages are gloo's, in a process group of these links' own, which connects ranks lazily.

    `mesh` is the grid as torch knows it, a DeviceMesh of (R, K) named ("replica", "block"): a
    callback's own collectives, SyncBatchNorm or a distributed checkpoint take their groups from it.
    Sums over peers are all-reduces of its dimension "replica".

    A thread waits for what leaves, because gloo's sends cannot be asked whether they have; where a
    method asks which neighbor's message is there, another waits for each neighbor's next label.
    """

    name: ClassVar[str] = "torch"
    settings: ClassVar[frozenset[str]] = frozenset({"device", "timeout"})
    routes: ClassVar[frozenset[str]] = frozenset({"auto", "nccl", "host"})

    def __new__(cls, start: Start) -> TorchLinks:
        """By NCCL where every rank has a GPU of its own, unless links.device says otherwise."""
        by_nccl = cls is TorchLinks and takes_nccl(start)
        return super().__new__(NcclLinks if by_nccl else cls)

    def __init__(self, start: Start) -> None:
        self._device = start.device or torch.device("cpu")
        super().__init__(start, staging(self._device, gpu_aware=False))
        self._is_joined_by_torch = isinstance(start.comm, TorchCommunicator)
        if not self._is_joined_by_torch:
            self._joined = join_by_torch(start.comm)
        blocks, replicas = start.grid
        ranks = torch.tensor(self._ranks).view(replicas, blocks)
        self._group = dist.new_group(backend="gloo", timeout=FOR_EVER, group_desc="hybrid links")
        self.mesh = DeviceMesh(self._device.type, ranks, mesh_dim_names=("replica", "block"))
        self._leaving = Waiter("messages that leave")
        self._arriving: dict[int, Waiter] = {}

    def _isend(self, memory: Tensor, number: int, tag: int) -> Request:
        with lost_ranks():
            work = dist.isend(memory, self._ranks[number], self._group, tag)
        return GlooRequest(work).watched_by(self._leaving)

    def _irecv(self, memory: Tensor, number: int, tag: int) -> Request:
        with lost_ranks():
            return GlooRequest(dist.irecv(memory, self._ranks[number], self._group, tag))

    def _arrived(self, number: int) -> bool:
        label, _ = self._inbox(number).labels[0]
        assert isinstance(label, GlooRequest)
        if number not in self._arriving:
            self._arriving[number] = Waiter(f"messages of rank {number}")
        label.watched_by(self._arriving[number])
        return super()._arrived(number)

    def _release(self) -> None:
        for waiter in (self._leaving, *self._arriving.values()):
            waiter.end()
        for group in (self._group, *self.mesh.get_all_groups()):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        if not self._is_joined_by_torch:
            self._joined.close()

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        self._send_staged(wait=True)
        place = self.place
        whole = grid or place.replicas == 1
        everyone: list[Any] = [None] * (place.count if whole else place.blocks)
        with lost_ranks():
            group = self._group if whole else self.mesh.get_group("block")
            dist.all_gather_object(everyone, value, group)
        return [everyone[rank] for rank in self._ranks] if whole else everyone

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        summed = self._for_engine(vector)
        with lost_ranks():
            work = dist.all_reduce(summed, group=self._peers_group(), async_op=True)

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
                received, sent, sizes, sizes_in_bytes(pieces), self._peers_group(), async_op=True
            )

        def finish() -> list[Tensor]:
            TorchRequest(work).wait()
            return split_bytes(self._of_engine(received), expected)

        return finish

    def _peers_group(self) -> Any:
        return self.mesh.get_group("replica")

    def _for_engine(self, tensor: Tensor) -> Tensor:
        """A tensor where the group of peers reads it."""
        outgoing = self._staging.outgoing(tensor)
        outgoing.wait()
        return outgoing.memory

    def _of_engine(self, tensor: Tensor) -> Tensor:
        """The tensor on the block's device."""
        return self._staging.arrived(tensor)


class NcclLinks(TorchLinks):
    """A tensor of a chain stays on the GPU, from which NCCL sends it; its label goes by gloo.

    A receive lets the stream wait, never the host. NCCL takes the messages of two ranks one after
    another, so that two that both send before they receive would wait for each other: messages to
    later blocks and those to earlier ones have a group of their own. A receive begins on a stream
    of its own, which does not wait for the computation before it.

    `backend` is gloo in tests, which take the same way without a GPU.
    """

    fewest_by_engine = 1
    backend: ClassVar[Literal["nccl", "gloo"]] = "nccl"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        blocks, replicas = start.grid
        seconds = limit_of_waits(start.settings.timeout)
        limit = timedelta(seconds=seconds) if seconds else FOR_EVER
        chains = torch.tensor(self._ranks).view(replicas, blocks).tolist()
        self._ways = {
            way: dist.new_subgroups_by_enumeration(chains, limit, self.backend)[0]
            for way in (1, -1)
        }
        self._receiving = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._connect()

    def _connect(self) -> None:
        """Make the communicators of all pairs, in an order in which no pair waits for another."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for k in range(self.size - 1):
            for way, sender in ((1, k), (-1, k + 1)):
                group, other = self._ways[way], 2 * k + 1 - sender
                if self.rank == sender:
                    dist.send(byte, group=group, group_dst=other)
                elif self.rank == other:
                    dist.recv(byte, group=group, group_src=sender)

    def _release(self) -> None:
        for group in self._ways.values():
            dist.destroy_process_group(group)
        super()._release()

    def _send(self, number: int, tensor: Tensor) -> None:
        if self.place.in_chain(number):
            self._drop_sent()
            self._send_memory(number, as_dense(tensor))
        else:
            super()._send(number, tensor)

    def _send_data(self, number: int, tensor: Tensor, tag: int) -> None:
        if not self.place.in_chain(number):
            super()._send_data(number, tensor, tag)
            return
        memory, way = memory_of(tensor), number - self.place.number
        with lost_ranks():
            work = dist.isend(memory, group=self._ways[way], group_dst=self.rank + way)
        request = TorchRequest(work) if self.backend == "nccl" else GlooRequest(work)
        self._outboxes[number].pending.append((request, memory))

    def _receive_data(self, number: int, box: Inbox, index: int) -> Tensor:
        if not self.place.in_chain(number):
            return super()._receive_data(number, box, index)
        way = self.place.number - number
        with torch.cuda.stream(self._receiving), lost_ranks():
            tensor = room_for(box.formats[index], self._room)
            if not tensor.numel():
                return tensor
            group = self._ways[way]
            work = dist.irecv(memory_of(tensor), group=group, group_src=self.rank - way)
        TorchRequest(work).wait()
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def _room(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)

    def _for_engine(self, tensor: Tensor) -> Tensor:
        return tensor

    def _of_engine(self, tensor: Tensor) -> Tensor:
        return tensor


def takes_nccl(start: Start) -> bool:
    """Whether NCCL joins these ranks; all ranks call it, and get the same answer.

    AgreedError, on all of them, where links.device asks for it and it cannot.
    """
    asked, comm = start.settings.device, start.comm
    mine = None
    if start.device is not None and start.device.type == "cuda" and dist.is_nccl_available():
        gpu = torch.cuda.get_device_properties(start.device)
        mine = (socket.gethostname(), str(gpu.uuid))
    everyone = comm.allgather(mine)
    can = None not in everyone and len(set(everyone)) == len(everyone)
    if asked == "nccl" and not can:
        lacking = next((r for r, gpu in enumerate(everyone) if gpu is None), None)
        why = "two ranks share a GPU" if lacking is None else f"rank {lacking} has no GPU for it"
        raise AgreedError(f"links.device is 'nccl', but {why}: choose auto or host")
    return can and asked != "host"


def join_by_torch(comm: Communicator) -> TorchCommunicator:
    """torch's default process group of ranks that MPI has joined; all ranks call it."""
    address, port, server = "", 0, None
    if comm.rank == 0 and not dist.is_initialized():
        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address, port = socket.gethostname(), server.port
    address, port = comm.bcast((address, port))
    store: Any = server
    if port and server is None:
        host = "localhost" if address == socket.gethostname() else address
        store = dist.TCPStore(host, port)
    return TorchCommunicator(store, comm.rank, comm.size)
