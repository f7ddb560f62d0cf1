"""Ranks that torchrun or srun has started without an MPI: how they exchange small values."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from hybrid.errors import one_line

T = TypeVar("T")
c10d: Any = torch.distributed
"""Not all of its names are there where torch was built without them."""

MEETING = timedelta(seconds=300)
"""Within which all ranks must have started."""
FOR_EVER = timedelta(days=30)
"""Of a message that another rank may take hours for; `links.timeout` watches over waits."""

_ABORTED = "aborted"
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below those that Linux gives out by itself."""


@dataclass
class _Request:
    """A barrier that has begun."""

    wait: Callable[[], Any]
    done: bool = False

    def Test(self) -> bool:  # noqa: N802
        """Wait for it; gloo cannot be asked."""
        self.wait()
        return True


class TorchCommunicator:
    """What this package uses of an mpi4py communicator, over gloo.

    `meeting` is the store at which the ranks of the communicator find each other. Its methods have
    mpi4py's names, and are collective unless said otherwise.
    """

    def __init__(self, meeting: Any, rank: int, size: int, job: Any = None) -> None:
        self.rank, self.size = rank, size
        self._job = meeting if job is None else job
        """The store of all ranks of the job."""
        self._meeting, self._made = meeting, 0
        self._gloo = gloo_group(c10d.PrefixStore("values", meeting), rank, size)

    def allgather(self, value: T) -> list[T]:
        """The (picklable) values of all ranks, in order."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self._gathered(torch.tensor([len(mine)]))
        padded = mine.new_zeros(int(max(lengths)))
        padded[: len(mine)] = mine
        everyone = self._gathered(padded)
        # what is read here has been written by the ranks of this very job
        return [
            pickle.loads(theirs[: int(length)].numpy().tobytes())  # noqa: S301
            for theirs, length in zip(everyone, lengths, strict=True)
        ]

    def bcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`."""
        return self.allgather(value if self.rank == root else None)[root]  # type: ignore[return-value]

    def Barrier(self) -> None:  # noqa: N802
        """Wait for all ranks."""
        if self.size > 1:
            self._gloo.barrier().wait()

    def Ibarrier(self) -> _Request:  # noqa: N802
        """Begin a barrier."""
        return _Request(self.Barrier)

    def Send(self, buffer: Any, rank: int) -> None:  # noqa: N802
        """Send an array to a rank; not collective."""
        self._gloo.send([torch.from_numpy(buffer)], rank, 0).wait()

    def Recv(self, buffer: Any, rank: int) -> None:  # noqa: N802
        """Receive an array of that size from a rank; not collective."""
        self._gloo.recv([torch.from_numpy(buffer)], rank, 0).wait()

    def Dup(self) -> TorchCommunicator:  # noqa: N802
        """A communicator of the same ranks."""
        return self.Split(0, self.rank)

    def Split(self, color: object, key: int = 0) -> TorchCommunicator:  # noqa: N802
        """A communicator of the ranks that give the same color, ordered by key, then by rank."""
        self._made += 1
        everyone = self.allgather((str(color), key, self.rank))
        mine = sorted(each[1:] for each in everyone if each[0] == str(color))
        meeting = c10d.PrefixStore(f"{self._made}/{color}", self._meeting)
        return TorchCommunicator(meeting, mine.index((key, self.rank)), len(mine), self._job)

    def split_by_host(self) -> TorchCommunicator:
        """A communicator of the ranks of this rank's host."""
        return self.Split(socket.gethostname(), self.rank)

    def new_store(self) -> Any:
        """An empty store that these ranks share."""
        self._made += 1
        return c10d.PrefixStore(f"store {self._made}", self._meeting)

    def Free(self) -> None:  # noqa: N802
        """Nothing is to be freed: connections end with the process."""

    def Abort(self, status: int) -> None:  # noqa: N802
        """End this rank; its launcher then ends the others. Not collective."""
        with suppress(RuntimeError):
            self._job.set(_ABORTED, "")
        sys.stderr.flush()
        os._exit(status)

    def is_aborted(self) -> bool:
        """Whether a rank has called `Abort`; not collective."""
        try:
            return bool(self._job.check([_ABORTED]))
        except RuntimeError:  # the store has ended with the first rank
            return True

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        self._gloo.allgather([everyone], [tensor]).wait()
        return everyone


def gloo_group(store: Any, rank: int, size: int) -> Any:
    """A process group of gloo, independent of torch's default group."""
    return c10d.ProcessGroupGloo(store, rank, size, FOR_EVER)


def of_torchrun(rank: int, size: int) -> TorchCommunicator:
    """The ranks of torchrun, or of any launcher that sets MASTER_ADDR and MASTER_PORT.

    ValueError if they do not meet there.
    """
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))

    def store() -> Any:
        return next(iter(c10d.rendezvous("env://", rank, size, timeout=MEETING)))[0]

    return _met(store, rank, size, f"MASTER_ADDR={host}, MASTER_PORT={port}")


def of_slurm(rank: int, size: int) -> TorchCommunicator:
    """The ranks of srun, which meet on the step's first host, at a port made of its number.

    ValueError if they do not.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    host, port = first_host(nodes), _slurm_port()

    def store() -> Any:
        return c10d.TCPStore(
            address_of(host), port, None, rank == 0, MEETING, wait_for_workers=False
        )

    return _met(store, rank, size, f"{host}:{port}")


def _met(store: Callable[[], Any], rank: int, size: int, where: str) -> TorchCommunicator:
    try:
        meeting = c10d.PrefixStore("hybrid", store())
        meeting.set(f"rank {rank}", "")
        meeting.wait([f"rank {each}" for each in range(size)], MEETING)
        return TorchCommunicator(meeting, rank, size)
    except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
        raise ValueError(
            f"{size} ranks were started, and rank {rank} has not met the others at {where} within "
            f"{MEETING.total_seconds():g} s ({one_line(error)}): use torchrun, mpirun or srun "
            "--mpi=pmix; for trainings of one process each, unset the launcher's variables"
        ) from None


def first_host(nodes: str) -> str:
    """The first name of one of Slurm's lists of hosts: of "gpu[07-09,12],x1" it is gpu07."""
    name, _, rest = nodes.partition("[")
    if not rest or "," in name:
        return nodes.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    return name + re.split("[-,]", numbers)[0] + suffix.partition(",")[0]


def address_of(host: str) -> str:
    """What to reach a host of Slurm's by: its name or, where that is Slurm's alone, its address."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        with suppress(OSError, subprocess.SubprocessError):
            asked = ("scontrol", "show", "node", host)
            told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
            if found := re.search(r"NodeAddr=(\S+)", told.stdout):
                return found[1]
        raise ValueError(f"no address is known of {host!r}, the first host of the step") from None
    return host


def _slurm_port() -> int:
    job, step = (int(os.environ.get(f"SLURM_{what}_ID", "0")) for what in ("JOB", "STEP"))
    return _FIRST_PORT + (job * 97 + step) % _PORTS


def new_store(comm: Any) -> Any:
    """An empty store that the ranks of a communicator share, also of one of MPI; collective."""
    if isinstance(comm, TorchCommunicator):
        return comm.new_store()
    address, port, server = "", 0, None
    if comm.rank == 0:
        server = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address, port = socket.gethostname(), server.port
    address, port = comm.bcast((address, port))
    if server is not None:
        return server
    host = "localhost" if address == socket.gethostname() else address
    return c10d.TCPStore(host, port, timeout=MEETING)
