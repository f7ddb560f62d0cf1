"""Links between MPI ranks, through mpi4py's buffer interface: no tensor is pickled."""

import os
import sys
from collections import deque
from math import prod
from threading import Event, Thread
from time import sleep
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import AgreedError, StoppedError, reason
from hybrid.links import probe
from hybrid.links.base import Program, RankLinks, Start
from hybrid.links.staging import Outgoing, staging
from hybrid.ranks.grid import Arrangement, Grid

T = TypeVar("T")
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool),
    *(torch.int16, torch.complex64, torch.complex128),
)
_FORMAT_TAG = 1
_FIRST_DATA_TAG = 2
IN_SLURM_SECONDS = 1800.0
"""In Slurm a rank that has waited so long ends its job, unless links.timeout is set."""


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

    name, in_one_process = "mpi", False
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
        self._staging = staging(device or torch.device("cpu"), gpu_aware)
        self._staged: deque[tuple[int, Outgoing]] = deque()
        self._formats_sent: dict[int, dict[tuple[int, ...], int]] = {}
        self._formats_received: dict[int, list[tuple[int, ...]]] = {}
        self._pending: deque[tuple[Any, Any]] = deque()
        self._peers_pending: deque[tuple[Any, Any]] = deque()
        """Separate: a peer may take a message much later, and `flush` does not wait for it."""

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank.

        A failure that the ranks have not agreed on ends the whole job at once: the others may be
        waiting for a message that will never come. So does a wait longer than `links.timeout`.
        """
        comm, settings, replicas = start.comm, start.settings, start.grid.replicas
        timeout = settings.timeout
        if timeout is None:
            timeout = IN_SLURM_SECONDS if "SLURM_JOB_ID" in os.environ else 0.0
        direct, _ = probe.agreed(settings.gpu_aware, start.device, comm, start.local_rank)
        grid = arranged(comm, replicas, start.side_by_side)
        links, ended = cls(grid, start.device, direct, replicas), Event()
        if timeout:
            Thread(target=_watch, args=(links, comm, timeout, ended), daemon=True).start()
        try:
            return links.run(program)
        except (AgreedError, StoppedError):
            raise
        except BaseException as error:
            abort(comm, error)
            raise
        finally:
            ended.set()
            links.free()
            if grid is not comm:
                grid.Free()

    def free(self) -> None:
        """Free the chain's communicator; messages that a peer has not taken still reach it."""
        if self._chain is not self._comm:
            self._chain.Free()

    def flush(self) -> None:
        self._send_staged(wait=True)
        self.waits_since = self.now()
        while self._pending:
            request, _ = self._pending.popleft()
            request.Wait()
        self.waits_since = None

    def _send(self, number: int, tensor: Tensor) -> None:
        self._drop_completed()
        tensor = tensor.detach()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        self._staged.append((number, self._staging.outgoing(tensor)))
        self._send_staged(wait=False)

    def _send_staged(self, wait: bool) -> None:
        """Send what has been copied, in order; all of it if asked to wait."""
        while self._staged and (wait or self._staged[0][1].ready()):
            number, outgoing = self._staged.popleft()
            outgoing.wait()
            self._send_memory(number, outgoing.memory)

    def _send_memory(self, number: int, tensor: Tensor) -> None:
        known = self._formats_sent.setdefault(number, {})
        key = (_DTYPES.index(tensor.dtype), *tensor.shape, *tensor.stride())
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
        dtype, *layout = known[tag - _FIRST_DATA_TAG]
        dims = len(layout) // 2
        tensor = self._staging.buffer(layout[:dims], layout[dims:], _DTYPES[dtype])
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

    def _post(self, number: int, request: Any, buffer: Any) -> None:
        pending = self._pending if self.place.in_chain(number) else self._peers_pending
        pending.append((request, buffer))

    def _drop_completed(self) -> None:
        """Let MPI progress, and free the buffers of sends that have left."""
        for pending in (self._pending, self._peers_pending):
            while pending and pending[0][0].Test():
                pending.popleft()


def arranged(comm: Any, replicas: int, side_by_side: Arrangement) -> Any:
    """A communicator whose rank r K + k has block k of replica r."""
    if replicas == 1:
        return comm
    grid = Grid(comm.size // replicas, replicas)
    return comm.Split(0, grid.place(comm.rank, side_by_side).number)


def _watch(links: MpiLinks, comm: Any, timeout: float, ended: Event) -> None:
    """End the job when this rank has waited too long: another rank, or its host, is stuck."""
    seen = goes_on = links.now()
    while not ended.wait(min(1.0, timeout / 4)):
        before, seen = seen, links.now()
        if seen - before > timeout / 2:
            goes_on = seen  # this rank was suspended itself
        since = links.waits_since
        # a second more for each rank: the first to speak ends the others
        if since is not None and seen - max(since, goes_on) > timeout + min(links.place.number, 10):
            waited = f"it has waited for another rank for {timeout:g} s (links.timeout)"
            remedy = "find out why that rank is stuck, then continue with --resume"
            abort(comm, TimeoutError(f"{waited}: {remedy}"))


def abort(comm: Any, error: BaseException) -> None:
    """Print the reason once, and end every rank of the job."""
    # where all ranks fail at the same point, the first to speak ends the others, which takes time
    sleep(min(1.0 + 0.2 * comm.rank, 3.0) if comm.rank else 0.0)
    try:
        print(f"hybrid: error: rank {comm.rank}: {reason(error)}", file=sys.stderr, flush=True)
    finally:  # even if stderr is closed
        comm.Abort(1)


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
    flat = tensor.as_strided((prod(tensor.shape),), (1,)).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()
