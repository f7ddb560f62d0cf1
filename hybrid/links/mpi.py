"""Links between MPI ranks, through mpi4py's buffer interface: no tensor is pickled."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import AgreedError, StoppedError
from hybrid.links import probe
from hybrid.links.base import Program, RankLinks, Start
from hybrid.links.ending import abort, waits_limited
from hybrid.links.layout import (
    as_dense,
    format_of,
    joined_bytes,
    memory_of,
    room_for,
    sizes_in_bytes,
    split_bytes,
)
from hybrid.links.staging import Outgoing, staging
from hybrid.ranks.grid import Grid, arranged

T = TypeVar("T")
_FORMAT_TAG = 1
_FIRST_DATA_TAG = 2


class MpiLinks(RankLinks):
    """One block for each rank: rank r K + k of `comm` has block k of replica r.

    A tensor travels as the bytes of its memory, in its own stride order, so channels_last needs no
    copy. The first tensor of a format (dtype, shape, strides) announces it in a message of its
    own; from then on the message's tag names the format and no shape travels:

        tag 1: [dtype, shape..., strides...]     tag 2 + i: the bytes of a tensor of format i

    MPI keeps the order of messages between two ranks, so the announcement is always read first.
    Buffers are kept until their send completes. A tensor on a GPU reaches MPI as its `Staging`
    says; the block computes on while it is copied, and the next call of these links sends it.

    Within a host a receiver copies from the sender's memory by itself. Between hosts a large
    message moves only while both ranks are inside MPI, unless the library moves it beside the
    work.
    """

    name, in_one_process, over_mpi = "mpi", False, True
    settings = frozenset({"gpu_aware", "timeout"})

    def __init__(
        self,
        comm: Any,
        device: torch.device | None = None,
        gpu_aware: bool = False,
        replicas: int = 1,
    ) -> None:
        from mpi4py import MPI

        super().__init__(Grid(comm.size // replicas, replicas).place(comm.rank))
        self._mpi = MPI
        self._comm = comm
        self._chain = comm if replicas == 1 else comm.Split(self.place.replica, self.rank)
        place = self.place
        self._block: Any = None if replicas == 1 else comm.Split(place.block, place.replica)
        """The communicator of this block's replicas."""
        self._staging = staging(device or torch.device("cpu"), gpu_aware)
        self._staged: deque[tuple[Outgoing, Callable[[Tensor], None]]] = deque()
        """What is on its way into messages, in order, and how each begins."""
        self._formats_sent: dict[int, dict[tuple[int, ...], int]] = {}
        self._formats_received: dict[int, list[tuple[int, ...]]] = {}
        self._pending: deque[tuple[Any, Any]] = deque()
        self._peers_pending: deque[tuple[Any, Any]] = deque()
        """Separate: a peer may take a message much later, and `flush` does not wait for it."""

    @classmethod
    def of(cls, comm: Any, device: torch.device, replicas: int) -> RankLinks:
        """Those of this rank on a grid with so many replicas."""
        return cls(comm, device, replicas=replicas)

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank.

        A failure that the ranks have not agreed on ends the whole job at once: the others may be
        waiting for a message that will never come. So does a wait longer than `links.timeout`.
        """
        comm, settings, replicas = start.comm, start.settings, start.grid.replicas
        direct, _ = probe.agreed(settings.gpu_aware, start.device, comm, start.local_rank)
        grid = arranged(comm, replicas, start.side_by_side)
        links = cls(grid, start.device, direct, replicas)
        try:
            with waits_limited(links, comm, settings.timeout):
                return links.run(program)
        except (AgreedError, StoppedError):
            raise
        except BaseException as error:
            abort(comm, error)
            raise
        finally:
            links.close()
            if grid is not comm:
                grid.Free()

    def close(self) -> None:
        """Free its communicators; messages that a peer has not taken still reach it."""
        if self._chain is not self._comm:
            self._chain.Free()
            self._block.Free()

    def flush(self) -> None:
        self._send_staged(wait=True)
        self.waits_since = self.now()
        while self._pending:
            request, _ = self._pending.popleft()
            request.Wait()
        self.waits_since = None

    def _send(self, number: int, tensor: Tensor) -> None:
        self._drop_completed()
        outgoing = self._staging.outgoing(as_dense(tensor))
        self._staged.append((outgoing, partial(self._send_memory, number)))
        self._send_staged(wait=False)

    def _send_staged(self, wait: bool) -> None:
        """Send what has been copied, in order; all of it if asked to wait."""
        while self._staged and (wait or self._staged[0][0].ready()):
            outgoing, begin = self._staged.popleft()
            outgoing.wait()
            begin(outgoing.memory)

    def _send_memory(self, number: int, tensor: Tensor) -> None:
        known = self._formats_sent.setdefault(number, {})
        key = format_of(tensor)
        if key not in known:
            known[key] = len(known)
            header = np.array(key, dtype=np.int64)
            self._post(number, self._comm.Isend(header, number, _FORMAT_TAG), header)
        buffer = _memory(tensor)
        request = self._comm.Isend([buffer, self._mpi.BYTE], number, _FIRST_DATA_TAG + known[key])
        self._post(number, request, buffer)

    def _receive(self, number: int) -> Tensor:
        self._drop_completed()
        # the other rank may need these before it sends the tensor that is waited for here
        self._send_staged(wait=True)
        known = self._formats_received.setdefault(number, [])
        status = self._mpi.Status()
        while True:
            message = self._comm.Mprobe(source=number, status=status)
            tag = status.Get_tag()
            if tag >= _FIRST_DATA_TAG:
                break
            header = np.empty(status.Get_count(self._mpi.INT64_T), dtype=np.int64)
            message.Recv(header)
            known.append(tuple(header.tolist()))
        tensor = room_for(known[tag - _FIRST_DATA_TAG], self._staging.buffer)
        message.Recv([_memory(tensor), self._mpi.BYTE])
        return self._staging.arrived(tensor)

    def _arrived(self, number: int) -> bool:
        self._drop_completed()
        self._send_staged(wait=False)
        return bool(self._comm.Iprobe(source=number))

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        self._send_staged(wait=True)
        everyone: list[T] = (self._comm if grid else self._chain).allgather(value)
        return everyone

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        mpi = self._mpi
        kind = mpi.DOUBLE if vector.dtype == torch.float64 else mpi.FLOAT
        total = self._staging.room([len(vector)], [1], vector.dtype)
        outgoing = self._staging.outgoing(vector)

        def begin(memory: Tensor) -> Any:
            # for MPI.IN_PLACE Open MPI takes a tree, whose root sends the vector log2(R) times
            return self._block.Iallreduce([_memory(memory), kind], [_memory(total), kind])

        wait = self._begin_with_peers(outgoing, begin)

        def finish() -> Tensor:
            wait()
            return self._staging.arrived(total)

        return finish

    def _exchange_with_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        sent, sizes = sizes_in_bytes(pieces), sizes_in_bytes(expected)
        received = self._staging.room([sum(sizes)], [1], torch.uint8)
        outgoing = self._staging.outgoing(joined_bytes(pieces))

        def begin(memory: Tensor) -> Any:
            byte = self._mpi.BYTE
            return self._block.Ialltoallv(
                [_memory(memory), sent, byte], [_memory(received), sizes, byte]
            )

        wait = self._begin_with_peers(outgoing, begin)

        def finish() -> list[Tensor]:
            wait()
            return split_bytes(self._staging.arrived(received), expected)

        return finish

    def _begin_with_peers(
        self, outgoing: Outgoing, begin: Callable[[Tensor], Any]
    ) -> Callable[[], None]:
        """Begin one of MPI's collectives of the peers once its data is there; gives its wait."""
        requests = []
        self._drop_completed()

        def post(memory: Tensor) -> None:
            requests.append(begin(memory))
            self._peers_pending.append((requests[0], memory))  # to let it progress

        self._staged.append((outgoing, post))
        self._send_staged(wait=False)

        def wait() -> None:
            self._send_staged(wait=True)
            requests[0].Wait()
            self._drop_completed()  # a grid without a chain has no messages that would do it

        return wait

    def _post(self, number: int, request: Any, buffer: Any) -> None:
        pending = self._pending if self.place.in_chain(number) else self._peers_pending
        pending.append((request, buffer))

    def _drop_completed(self) -> None:
        """Let MPI progress, and free the buffers of sends that have left."""
        for pending in (self._pending, self._peers_pending):
            while pending and pending[0][0].Test():
                pending.popleft()


def _memory(tensor: Tensor) -> Any:
    """The bytes of a dense tensor as MPI takes them."""
    flat = memory_of(tensor)
    return flat if flat.is_cuda else flat.numpy()
