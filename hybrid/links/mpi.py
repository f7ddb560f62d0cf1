"""Links between MPI ranks, through mpi4py's buffer interface: no tensor is pickled."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hybrid.links.base import Start
from hybrid.links.posted import PostedLinks, Request
from hybrid.links.staging import (
    Outgoing,
    joined_bytes,
    memory_of,
    sizes_in_bytes,
    split_bytes,
    staging,
)

T = TypeVar("T")


class MpiRequest:
    """A request of mpi4py."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()

    def done(self) -> bool:
        return bool(self._request.Test())


class MpiLinks(PostedLinks):
    """Messages are MPI's, in communicators of these links' own.

    Within a host a receiver copies from the sender's memory by itself. Between hosts a large
    message moves only while both ranks are inside MPI, unless the library moves it beside the
    work.
    """

    name, over_mpi = "mpi", True
    settings: ClassVar[frozenset[str]] = frozenset({"timeout"})

    def __init__(self, start: Start) -> None:
        from mpi4py import MPI

        super().__init__(start, staging(start.device or torch.device("cpu")))
        comm, place, self._mpi = start.comm, self.place, MPI
        self._grid = comm.mpi.Split(0, place.number)
        self._chain = (
            self._grid if place.replicas == 1 else comm.mpi.Split(place.replica, self.rank)
        )
        self._block: Any = None
        """The communicator of this block's replicas."""
        if place.replicas > 1:
            self._block = comm.mpi.Split(place.block, place.replica)
        self._sums: deque[tuple[Any, Any]] = deque()
        """Collectives of the peers on their way, and their memory."""

    def _isend(self, memory: Tensor, number: int, tag: int) -> Request:
        return MpiRequest(self._grid.Isend([memory.numpy(), self._mpi.BYTE], number, tag))

    def _irecv(self, memory: Tensor, number: int, tag: int) -> Request:
        return MpiRequest(self._grid.Irecv([memory.numpy(), self._mpi.BYTE], number, tag))

    def _release(self) -> None:
        if self._block is not None:
            self._block.Free()
            self._chain.Free()
        self._grid.Free()

    def _drop_sent(self) -> None:
        super()._drop_sent()
        while self._sums and self._sums[0][0].Test():
            self._sums.popleft()

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        self._send_staged(wait=True)
        everyone: list[T] = (self._grid if grid else self._chain).allgather(value)
        return everyone

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        mpi = self._mpi
        kind = mpi.DOUBLE if vector.dtype == torch.float64 else mpi.FLOAT
        total = self._staging.buffer([len(vector)], [1], vector.dtype)

        def begin(memory: Tensor) -> Any:
            # for MPI.IN_PLACE Open MPI takes a tree, whose root sends the vector log2(R) times
            terms, sums = (memory_of(each).numpy() for each in (memory, total))
            return self._block.Iallreduce([terms, kind], [sums, kind])

        wait = self._begin_with_peers(self._staging.outgoing(vector), begin)

        def finish() -> Tensor:
            wait()
            return self._staging.arrived(total)

        return finish

    def _exchange_with_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        byte, sent, sizes = self._mpi.BYTE, sizes_in_bytes(pieces), sizes_in_bytes(expected)
        received = self._staging.buffer([sum(sizes)], [1], torch.uint8)

        def begin(memory: Tensor) -> Any:
            out, into = memory.numpy(), received.numpy()
            return self._block.Ialltoallv([out, sent, byte], [into, sizes, byte])

        wait = self._begin_with_peers(self._staging.outgoing(joined_bytes(pieces)), begin)

        def finish() -> list[Tensor]:
            wait()
            return split_bytes(self._staging.arrived(received), expected)

        return finish

    def _begin_with_peers(
        self, outgoing: Outgoing, begin: Callable[[Tensor], Any]
    ) -> Callable[[], None]:
        """Begin one of MPI's collectives of the peers once its data is there; gives its wait."""
        requests = []
        self._drop_sent()

        def post(memory: Tensor) -> None:
            requests.append(begin(memory))
            self._sums.append((requests[0], memory))  # to let it progress

        self._staged.append((outgoing, post))
        self._send_staged(wait=False)

        def wait() -> None:
            self._send_staged(wait=True)
            requests[0].Wait()
            self._drop_sent()  # a grid without a chain has no messages that would do it

        return wait
