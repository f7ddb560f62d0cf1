"""Links between MPI ranks, through mpi4py's buffer interface: no tensor is pickled."""

from collections.abc import Sequence
from time import sleep
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hybrid.links.base import Start
from hybrid.links.communicator import Communicator, Transfer
from hybrid.links.posted import PostedLinks
from hybrid.links.staging import GpuMemory

T = TypeVar("T")


class MpiTransfer:
    """An mpi4py request."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()

    def done(self) -> bool:
        return bool(self._request.Test())

    def cancel(self) -> None:
        self._request.Cancel()
        self._request.Wait()


class MpiCommunicator(Communicator):
    """The ranks of an mpi4py communicator, `mpi`."""

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        self.mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        self._byte = MPI.BYTE
        self._numbers = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}

    def gather(self, value: T, root: int = 0) -> list[T] | None:
        values: list[T] | None = self.mpi.gather(value, root)
        return values

    def bcast(self, value: T, root: int = 0) -> T:
        received: T = self.mpi.bcast(value, root)
        return received

    def allgather(self, value: T) -> list[T]:
        values: list[T] = self.mpi.allgather(value)
        return values

    def split(
        self, groups: Sequence[Sequence[int]], timeout: float | None, on_device: bool = False
    ) -> "MpiCommunicator":
        for color, ranks in enumerate(groups):
            if self.rank in ranks:
                return MpiCommunicator(self.mpi.Split(color, ranks.index(self.rank)))
        raise AssertionError(groups)

    def isend(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        return MpiTransfer(self.mpi.Isend([_buffer(memory), self._byte], rank, tag))

    def irecv(self, memory: Tensor, rank: int, tag: int) -> Transfer:
        return MpiTransfer(self.mpi.Irecv([_buffer(memory), self._byte], rank, tag))

    def all_reduce(self, vector: Tensor) -> tuple[Tensor, Transfer]:
        # with MPI.IN_PLACE Open MPI uses a tree, whose root sends the vector log2(R) times
        total, kind = torch.empty_like(vector, pin_memory=vector.is_pinned()), vector.dtype
        buffers = ([x.numpy(), self._numbers[kind]] for x in (vector, total))
        return total, MpiTransfer(self.mpi.Iallreduce(*buffers))

    def all_to_all(
        self, memory: Tensor, sizes: list[int], expected: list[int]
    ) -> tuple[Tensor, Transfer]:
        received = torch.empty(sum(expected), dtype=torch.uint8, pin_memory=memory.is_pinned())
        outgoing = [memory.numpy(), sizes, self._byte]
        incoming = [received.numpy(), expected, self._byte]
        return received, MpiTransfer(self.mpi.Ialltoallv(outgoing, incoming))

    def barrier(self) -> None:
        request = self.mpi.Ibarrier()
        while not request.Test():
            sleep(0.001)

    def abort(self, status: int) -> None:
        self.mpi.Abort(status)

    def close(self) -> None:
        self.mpi.Free()


def _buffer(memory: Tensor) -> Any:
    """Return what mpi4py takes: an array, or a GPU's tensor, which it finds by DLPack."""
    return memory if memory.is_cuda else memory.numpy()


class MpiLinks(PostedLinks):
    """Links over MPI, in their own communicators.

    Within a host the receiver copies from the sender's memory by itself. Between hosts a large
    message makes progress only while both ranks are inside MPI, unless the library has a progress
    thread. With links.device = "mpi" neighbors' tensors are sent from a GPU's memory; the peers'
    collectives, which few CUDA-aware libraries can begin there, go through the host.
    """

    name, library, over_mpi = "mpi", "MPI", True
    settings: ClassVar[frozenset[str]] = frozenset({"device", "timeout"})

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        if start.settings.device == "mpi":
            self._staging = GpuMemory(self._device)

    @classmethod
    def way(cls, start: Start) -> str:
        aware = start.settings.device == "mpi"
        return "MPI from GPU memory" if aware else super().way(start)
