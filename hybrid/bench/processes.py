"""The processes of a benchmark: torch.distributed over MPI's ranks, and the cores of a host."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybrid.bench.measure import CPU
from hybrid.ranks.hosts import interfaces


def process_group(comm: Any, device: torch.device = CPU) -> None:
    """Initialize torch.distributed over the ranks of an mpi4py communicator. All must call it.

    Rank 0 listens at MASTER_ADDR and MASTER_PORT, else at a free port of 127.0.0.1 (of its host's
    name where there are several hosts). Unless GLOO_SOCKET_IFNAME is set it becomes the interface
    that leads to rank 0.
    """
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    alone = bool(comm.allreduce(host.size == comm.size, op=MPI.LAND))
    host.Free()
    # rank 0 keeps the port it is given, so nobody can take it before the others connect
    store = place = None
    if comm.rank == 0:
        name = "127.0.0.1" if alone else MPI.Get_processor_name()
        address = os.environ.get("MASTER_ADDR") or name
        port = int(os.environ.get("MASTER_PORT") or 0)
        store = TCPStore(address, port, comm.size, is_master=True, wait_for_workers=False)
        place = (address, store.port)
    address, port = comm.bcast(place)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        mine = probe.getsockname()[0]
    towards = next((name for name, there in interfaces().items() if there == mine), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", towards)
    if store is None:
        store = TCPStore(address, port, comm.size, is_master=False)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)


def host_cores() -> set[int]:
    """The cores of this host this process could use if its launcher had not bound it."""
    bound = os.sched_getaffinity(0)
    try:
        # the kernel keeps those that exist and that the process's container may use
        os.sched_setaffinity(0, range(max(os.cpu_count() or 1, max(bound) + 1)))
        return os.sched_getaffinity(0)
    except OSError:
        return bound
    finally:
        os.sched_setaffinity(0, bound)


@contextmanager
def compute_threads(threads: int) -> Iterator[None]:
    """`threads` compute threads, on all of the host's cores if they are more than the bound ones.

    Every thread of the process is moved: those of torch's pool keep the cores of their making.
    """
    before, bound = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(threads)
    if threads > len(bound):
        _bind(host_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if threads > len(bound):
            _bind(bound)


def _bind(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
