"""A program started on every rank: MPI's, virtual ones, or threads."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, TypeVar

import torch

from hybrid.errors import AgreedError, CodeError, one_line, place, told
from hybrid.links import Network, RankLinks, run_threads, run_virtual
from hybrid.links.base import Program
from hybrid.ranks import launch
from hybrid.settings.config import LinkSettings

T = TypeVar("T")


def start(
    program: Program[T],
    size: int,
    links: LinkSettings,
    device: torch.device | None,
    failed: ValueError | None = None,
) -> T:
    """Run the program on `size` ranks; give the first one's result, under mpirun this one's.

    `failed` is what this rank cannot begin for, which the program tells the others.
    """
    comm: Any = launch.communicator()
    program = _explained(program)
    if comm is None:
        if failed is not None:
            raise AgreedError(str(failed))
        threads = torch.get_num_threads()
        if links.kind == "virtual":
            return run_virtual(size, program, Network.asked(links), threads)[0]
        return run_threads(size, program, threads)[0]
    from hybrid.links import probe
    from hybrid.links.mpi import run_mpi

    found = launch.ranks()
    local_rank = found.local_rank if found else 0
    direct = probe.agreed(links.gpu_aware, device, comm, local_rank)
    timeout = links.timeout
    if timeout is None:
        timeout = 1800.0 if "SLURM_JOB_ID" in os.environ else 0.0
    return run_mpi(comm, program, device, direct.direct, timeout)[0]


def _explained(program: Program[T]) -> Program[T]:
    """The program, but for errors of code that was given to it: those say where they come from."""

    @wraps(program)
    def explained(links: RankLinks) -> T:
        try:
            return program(links)
        except AgreedError:
            raise
        except Exception as error:
            cause, where = error.__cause__ or error, place(error.__cause__ or error)
            if isinstance(error, ValueError) and error.__cause__ is not None:
                text = one_line(error) + (f" ({where})" if where else "")
            elif where:
                text = told(error)
            else:
                raise
            # under mpirun the rank is named by whoever ends the job
            named = links.size > 1 and launch.communicator() is None
            raise CodeError(f"block {links.rank}: {text}" if named else text) from cause

    return explained
