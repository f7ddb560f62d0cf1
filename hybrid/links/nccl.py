"""Links between processes with one GPU each: tensors travel by NCCL."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid.links.base import Start
from hybrid.links.communicator import Communicator, Transfer
from hybrid.links.gloo import GlooLinks
from hybrid.links.posted import Channel
from hybrid.links.staging import Staging, memory_of


class NcclChannel(Channel):
    """Tensors to and from a neighbor: labels by gloo, data from GPU to GPU by NCCL.

    A receive makes the stream wait, never the host. It begins on a separate stream, which does not
    wait for earlier computation.
    """

    def __init__(
        self,
        labels: Communicator,
        number: int,
        staging: Staging,
        wait: Callable[[Transfer], None],
        data: tuple[Communicator, Communicator],
        receiving: Any,
    ) -> None:
        super().__init__(labels, number, staging, wait)
        self._data_out, self._data_in = data
        self._neighbor_block, self._receiving = number % self._data_out.size, receiving

    def _send_data(self, tensor: Tensor, index: int) -> None:
        memory = memory_of(tensor)
        self.pending.append((self._data_out.isend(memory, self._neighbor_block, 0), memory))

    def _receive_data(self, index: int) -> Tensor:
        with torch.cuda.stream(self._receiving):
            tensor = self._staging.room(self._formats[index])
            if not tensor.numel():
                return tensor
            transfer = self._data_in.irecv(memory_of(tensor), self._neighbor_block, 0)
        transfer.wait()
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


class NcclLinks(GlooLinks):
    """Tensors between blocks of a chain stay on the GPU; all others go through gloo.

    NCCL handles the messages between two ranks one after another, so two ranks that both send
    before they receive would deadlock. Messages to later blocks and messages to earlier blocks
    therefore have separate groups.

    Without a GPU, as in tests, gloo carries all tensors over the same groups.
    """

    collective_above = 1
    on_device = True

    @classmethod
    def way(cls, start: Start) -> str:
        return "NCCL"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        K, timeout = self.size, start.settings.timeout
        chains = [range(first, first + K) for first in range(0, self.place.count, K)]
        self._ways = {way: self._whole.split(chains, timeout, on_device=True) for way in (1, -1)}
        self._groups |= dict.fromkeys(self._ways.values())
        is_cuda = self._device.type == "cuda"
        self._receiving = torch.cuda.Stream(self._device) if is_cuda else None
        self._connect_ways()

    def _connect_ways(self) -> None:
        """Create the communicators of all pairs, in an order in which no pair waits for another."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for k in range(self.size - 1):
            for way, sender in ((1, k), (-1, k + 1)):
                receiver = 2 * k + 1 - sender
                if self.rank == sender:
                    self._ways[way].isend(byte, receiver, 0).wait()
                elif self.rank == receiver:
                    self._ways[way].irecv(byte, sender, 0).wait()

    def _new_channel(self, number: int) -> Channel:
        if not self.place.in_chain(number):
            return super()._new_channel(number)
        way = number - self.place.number
        data, staging = (self._ways[way], self._ways[-way]), self._peers_staging
        return NcclChannel(self._whole, number, staging, self._wait_for, data, self._receiving)
