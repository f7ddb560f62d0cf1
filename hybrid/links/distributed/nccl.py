"""Links between processes with a GPU each, whose tensors travel by NCCL."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hybrid.links.distributed.communicator import c10d
from hybrid.links.distributed.gloo import GlooLinks
from hybrid.links.distributed.mailbox import Receiver
from hybrid.links.layout import as_dense, memory_of
from hybrid.links.staging import Outgoing


class NcclLinks(GlooLinks):
    """A tensor stays on the GPU; only its format goes from host to host, by gloo.

    A receive lets the stream wait, never the host. NCCL takes the messages of a communicator one
    after another, so that two ranks that both send before they receive would wait for each other:
    the messages to later blocks and those to earlier ones have a communicator of their own.
    """

    fewest_by_engine = 1

    def __init__(self, comm: Any, device: torch.device | None = None, replicas: int = 1) -> None:
        super().__init__(comm, device, replicas)
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        names = (f"{way} {self.place.replica}" for way in ("later", "earlier"))
        self._later, self._earlier = (
            _nccl_group(c10d.PrefixStore(name, self._store), self.rank, self.size) for name in names
        )
        self._connect()

    def _connect(self) -> None:
        """Make the communicators of all pairs, in an order in which no pair waits for another."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for k in range(self.size - 1):
            for group, sender in ((self._later, k), (self._earlier, k + 1)):
                if self.rank == sender:
                    group.send([byte], 2 * k + 1 - sender, 0).wait()
                elif self.rank == 2 * k + 1 - sender:
                    group.recv([byte], sender, 0).wait()

    def flush(self) -> None:
        super().flush()
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, number: int, tensor: Tensor) -> None:
        if not self.place.in_chain(number):
            super()._send(number, tensor)
            return
        dense = as_dense(tensor)
        self._sender(number).put(Outgoing(_format_alone(dense)))
        ahead = number > self.place.number
        group = self._later if ahead else self._earlier
        work = group.send([memory_of(dense)], self.rank + (1 if ahead else -1), 0)
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        self._under_way.append((work, dense))

    def _receive(self, number: int) -> Tensor:
        if not self.place.in_chain(number):
            return super()._receive(number)
        format_ = self._receiver(number).take()
        tensor = torch.empty_like(format_, device=self._device)
        behind = number < self.place.number
        group = self._later if behind else self._earlier
        group.recv([memory_of(tensor)], self.rank + (-1 if behind else 1), 0).wait()
        return tensor

    def _receiver(self, number: int) -> Receiver:
        if number not in self._receivers and self.place.in_chain(number):
            self._receivers[number] = Receiver(self._group, number, _meta)
        return super()._receiver(number)

    def _to_engine(self, tensor: Tensor) -> Tensor:
        return tensor

    def _from_engine(self, tensor: Tensor) -> Tensor:
        return tensor

    def _group_of_peers(self) -> Any:
        return self._peers_of(_nccl_group)


def one_gpu_each(comm: Any, device: torch.device | None) -> bool:
    """Whether NCCL can join these ranks: each has a GPU that no other has; all ranks call it."""
    mine = None
    if device is not None and device.type == "cuda" and c10d.is_nccl_available():
        mine = (socket.gethostname(), torch.cuda.get_device_properties(device).uuid)
    everyone = [str(gpu) if gpu else "" for gpu in comm.allgather(mine)]
    return "" not in everyone and len(set(everyone)) == len(everyone)


def _nccl_group(store: Any, rank: int, size: int) -> Any:
    return c10d.ProcessGroupNCCL(store, rank, size, c10d.ProcessGroupNCCL.Options())


def _meta(shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _format_alone(tensor: Tensor) -> Tensor:
    return _meta(list(tensor.shape), list(tensor.stride()), tensor.dtype)
