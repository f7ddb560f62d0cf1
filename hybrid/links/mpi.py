"""Links between MPI ranks, through mpi4py's buffer interface: no tensor is pickled."""

from __future__ import annotations

import sys
import threading
from collections import deque
from math import prod
from queue import Empty, SimpleQueue
from time import sleep
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import reason
from hybrid.links.base import AgreedError, Program, RankLinks

T = TypeVar("T")
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
)
_FORMAT_TAG = 1
_FIRST_DATA_TAG = 2


class MpiLinks(RankLinks):
    """One block a rank.

    A tensor travels as the bytes of its memory, in its own stride order, so channels_last needs no
    copy. The first tensor of a format (dtype, shape, strides) announces it in a message of its
    own; from then on the message's tag names the format and no shape travels:

        tag 1: [dtype, shape..., strides...]     tag 2 + i: the bytes of a tensor of format i

    MPI keeps the order of messages between two ranks, so the announcement is always read first.
    Buffers are kept until their send completes. A tensor on a GPU is staged through host memory.

    Within a host a receiver copies from the sender's memory by itself. Between hosts a large
    message moves only while both ranks are inside MPI, so there (`overlap`) a thread beside the
    work receives ahead and pushes what is being sent.
    """

    def __init__(
        self, comm: Any, device: torch.device | None = None, overlap: bool | None = None
    ) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, comm.size)
        self._mpi = MPI
        self._comm = comm
        self._device = device or torch.device("cpu")
        self._formats_sent: dict[int, dict[tuple[int, ...], int]] = {}
        self._formats_received: dict[int, list[tuple[int, ...]]] = {}
        self._pending: deque[tuple[Any, Any]] = deque()
        if overlap is None:
            overlap = _between_hosts(comm)
        self._beside: _Beside | None = None
        if overlap and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._beside = _Beside(self)

    def run(self, program: Program[T]) -> T:
        try:
            return super().run(program)
        finally:
            self.close()

    def close(self) -> None:
        """End the thread beside the work, if there is one."""
        if self._beside is not None:
            self._beside.stop()

    def flush(self) -> None:
        if self._beside is not None:
            self._beside.flush()
            return
        while self._pending:
            request, _ = self._pending.popleft()
            request.Wait()

    def _send(self, peer: int, tensor: Tensor) -> None:
        self._drop_completed()
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        known = self._formats_sent.setdefault(peer, {})
        key = (_DTYPES.index(tensor.dtype), *tensor.shape, *tensor.stride())
        if key not in known:
            known[key] = len(known)
            header = np.array(key, dtype=np.int64)
            self._post(self._comm.Isend(header, dest=peer, tag=_FORMAT_TAG), header)
        buffer = _memory(tensor)
        request = self._comm.Isend(
            [buffer, self._mpi.BYTE], dest=peer, tag=_FIRST_DATA_TAG + known[key]
        )
        self._post(request, buffer)

    def _receive(self, peer: int) -> Tensor:
        if self._beside is not None:
            return self._beside.take(peer).to(self._device)
        self._drop_completed()
        status = self._mpi.Status()
        tensor: Tensor | None = None
        while tensor is None:
            message = self._comm.Mprobe(source=peer, status=status)
            tensor = self.accept(peer, message, status)
        message.Recv([_memory(tensor), self._mpi.BYTE])
        return tensor.to(self._device)

    def accept(self, peer: int, message: Any, status: Any) -> Tensor | None:
        """Memory for a probed message's tensor; an announcement is read, and gives None."""
        known = self._formats_received.setdefault(peer, [])
        tag = status.Get_tag()
        if tag < _FIRST_DATA_TAG:
            header = np.empty(status.Get_count(self._mpi.INT64_T), dtype=np.int64)
            message.Recv(header)
            known.append(tuple(header.tolist()))
            return None
        dtype, *layout = known[tag - _FIRST_DATA_TAG]
        dims = len(layout) // 2
        return torch.empty_strided(layout[:dims], layout[dims:], dtype=_DTYPES[dtype])

    def _all_gather(self, value: T) -> list[T]:
        everyone: list[T] = self._comm.allgather(value)
        return everyone

    def _post(self, request: Any, buffer: Any) -> None:
        self._pending.append((request, buffer))
        if self._beside is not None:
            self._beside.start()

    def _drop_completed(self) -> None:
        """Let MPI progress, and free the buffers of sends that have left."""
        if self._beside is None:
            self.drop_completed()

    def drop_completed(self) -> bool:
        """Free the buffers of sends that have left; whether any had."""
        any_left = False
        while self._pending and self._pending[0][0].Test():
            self._pending.popleft()
            any_left = True
        return any_left


class _Beside:
    """Moves one rank's messages while the rank works."""

    IDLE_SECONDS = 2e-4

    def __init__(self, links: MpiLinks) -> None:
        self._links = links
        peers = [p for p in (links.rank - 1, links.rank + 1) if 0 <= p < links.size]
        self._arrived: dict[int, SimpleQueue[Tensor]] = {peer: SimpleQueue() for peer in peers}
        self._arriving: dict[int, deque[tuple[Any, Tensor]]] = {peer: deque() for peer in peers}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="links", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def flush(self) -> None:
        while self._links._pending and self._failure is None:
            sleep(self.IDLE_SECONDS)
        self._check()

    def take(self, peer: int) -> Tensor:
        self.start()
        while True:
            try:
                return self._arrived[peer].get(timeout=0.5)
            except Empty:
                self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                moved = [self._probe(peer) | self._hand_over(peer) for peer in self._arrived]
                if not (self._links.drop_completed() or any(moved)):
                    sleep(self.IDLE_SECONDS)
        except BaseException as error:
            self._failure = error

    def _probe(self, peer: int) -> bool:
        """Begin to receive the next message of `peer`, if there is one."""
        links = self._links
        status = links._mpi.Status()
        message = links._comm.Improbe(source=peer, status=status)
        if message is None:
            return False
        tensor = links.accept(peer, message, status)
        if tensor is not None:
            request = message.Irecv([_memory(tensor), links._mpi.BYTE])
            self._arriving[peer].append((request, tensor))
        return True

    def _hand_over(self, peer: int) -> bool:
        """Give what has arrived to the rank, in order."""
        arriving, any_arrived = self._arriving[peer], False
        while arriving and arriving[0][0].Test():
            self._arrived[peer].put(arriving.popleft()[1])
            any_arrived = True
        return any_arrived


def run_mpi(comm: Any, program: Program[T], device: torch.device | None = None) -> list[T]:
    """Run `program` on this rank; give its result as a list of one.

    A failure that the ranks have not agreed on ends the whole job at once: the others may be
    waiting for a message that will never come.
    """
    try:
        return [MpiLinks(comm, device).run(program)]
    except AgreedError:
        raise
    except BaseException as error:
        abort(comm, error)
        raise


def abort(comm: Any, error: BaseException) -> None:
    """Say why, once, and end every rank of the job."""
    # where all ranks fail at the same point, the first to speak ends the others
    sleep(min(0.2 * comm.rank, 2.0))
    print(f"hybrid: error: rank {comm.rank}: {reason(error)}", file=sys.stderr, flush=True)
    comm.Abort(1)


def _between_hosts(comm: Any) -> bool:
    """Whether the ranks are on several hosts; all must call it."""
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    alone = host.size == comm.size
    host.Free()
    return not comm.allreduce(alone, op=MPI.LAND)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _memory(tensor: Tensor) -> Any:
    """The memory of a dense tensor as bytes, without a copy."""
    flat = tensor.as_strided((prod(tensor.shape),), (1,))
    return flat.view(torch.uint8).numpy()
