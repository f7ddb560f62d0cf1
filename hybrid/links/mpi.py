"""Links between MPI ranks, through mpi4py's buffer interface: no tensor is pickled.

`python -m hybrid.links.mpi` tries whether MPI reads and writes GPU memory.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

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
    settings: ClassVar[frozenset[str]] = frozenset({"device", "timeout"})
    routes: ClassVar[frozenset[str]] = frozenset({"auto", "mpi", "host"})

    def __init__(self, start: Start) -> None:
        from mpi4py import MPI

        device, comm = start.device or torch.device("cpu"), start.comm
        route = agreed(start.settings.device, device, comm, start.local_rank)
        super().__init__(start, staging(device, route.direct))
        place, self._mpi = self.place, MPI
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
        return MpiRequest(self._grid.Isend([_buffer(memory), self._mpi.BYTE], number, tag))

    def _irecv(self, memory: Tensor, number: int, tag: int) -> Request:
        return MpiRequest(self._grid.Irecv([_buffer(memory), self._mpi.BYTE], number, tag))

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
        total = self._staging.room([len(vector)], [1], vector.dtype)

        def begin(memory: Tensor) -> Any:
            # for MPI.IN_PLACE Open MPI takes a tree, whose root sends the vector log2(R) times
            terms, sums = (_buffer(memory_of(each)) for each in (memory, total))
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
        received = self._staging.room([sum(sizes)], [1], torch.uint8)

        def begin(memory: Tensor) -> Any:
            out, into = _buffer(memory), _buffer(received)
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


def _buffer(memory: Tensor) -> Any:
    """Bytes (n,) as MPI takes them."""
    return memory if memory.is_cuda else memory.numpy()


SECONDS = 60.0
_OF_A_JOB = (
    *("OMPI_COMM_WORLD", "OMPI_MCA_orte_", "OMPI_MCA_ess", "PMIX_", "PMI_", "PRTE_"),
    *("SLURM_", "MPI_LOCAL"),
)
"""Variables that make a process a rank; a child without them is a job by itself."""


class Answer(NamedTuple):
    """Whether links hand GPU memory to MPI, and why."""

    direct: bool
    why: str


def agreed(asked: str, device: torch.device | None, comm: Any, local_rank: int) -> Answer:
    """What all ranks do; every rank calls it. `auto` makes one trial on each host."""
    if device is None or device.type != "cuda":
        mine = Answer(False, "no GPU")
    elif asked != "auto":
        mine = Answer(asked == "mpi", f"links.device is {asked}")
    else:
        mine = try_in_child() if local_rank == 0 else Answer(True, "")
    answers: list[Answer] = comm.allgather(mine)
    return next((a for a in answers if not a.direct), answers[0])


def try_in_child(command: list[str] | None = None, seconds: float = SECONDS) -> Answer:
    """Send a tensor on the GPU to oneself, in a process that is no rank."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
    try:
        done = subprocess.run(
            command or [sys.executable, "-m", "hybrid.links.mpi"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Answer(False, f"a trial gave no answer in {seconds:g} s")
    if done.returncode < 0:
        return Answer(False, f"a trial was ended by {signal.Signals(-done.returncode).name}")
    said = done.stdout.strip().splitlines()
    if done.returncode:
        return Answer(False, said[-1] if said else f"a trial ended with {done.returncode}")
    return Answer(True, "a trial on this host came back whole")


def main() -> int:
    """Exit status 0 if GPU memory came back whole."""
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return 1
    torch.cuda.set_device(0)  # before MPI looks for a GPU
    from mpi4py import MPI

    sent = torch.arange(1 << 20, device="cuda").to(torch.uint8)
    received = torch.zeros_like(sent)
    torch.cuda.synchronize()
    request = MPI.COMM_SELF.Isend([sent, MPI.BYTE], dest=0, tag=1)
    MPI.COMM_SELF.Recv([received, MPI.BYTE], source=0, tag=1)
    request.Wait()
    if not torch.equal(sent, received):
        print("what a trial sent did not come back")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
