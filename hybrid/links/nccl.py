"""Links between processes with a GPU each, whose tensors travel by NCCL."""

from __future__ import annotations

import socket
from typing import Any, ClassVar, Literal

import torch
import torch.distributed
from torch import Tensor

from hybrid.errors import AgreedError
from hybrid.links.base import Start
from hybrid.links.communicator import lost_ranks
from hybrid.links.gloo import GlooLinks, GlooRequest, TorchRequest, dist
from hybrid.links.posted import Inbox
from hybrid.links.staging import as_dense, memory_of, room_for


class NcclLinks(GlooLinks):
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
        chains = torch.tensor(self._ranks).view(replicas, blocks).tolist()
        self._ways = {
            way: dist.new_subgroups_by_enumeration(chains, self._limit, self.backend)[0]
            for way in (1, -1)
        }
        self._receiving = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._connect_ways()

    def _connect_ways(self) -> None:
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
        while self._ways:
            dist.destroy_process_group(self._ways.popitem()[1])
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


class TorchLinks(GlooLinks):
    """The links of a run, whatever launcher has started its ranks."""

    def __new__(cls, start: Start) -> Any:
        """By NCCL where every rank has a GPU of its own, unless links.device says otherwise."""
        return NcclLinks(start) if takes_nccl(start) else super().__new__(cls)


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
