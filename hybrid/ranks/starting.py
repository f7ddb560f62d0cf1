"""A program started on every rank: MPI's, virtual ones, or threads."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, TypeVar

import torch

from hybrid.errors import AgreedError, CodeError, StoppedError, format_error, one_line, place
from hybrid.links import Network, RankLinks, run_threads, run_virtual
from hybrid.links.base import Program
from hybrid.ranks import launch
from hybrid.ranks.grid import Arrangement, Grid, Place
from hybrid.settings.config import LinkSettings

T = TypeVar("T")


def start(
    program: Program[T],
    grid: Grid,
    links: LinkSettings,
    device: torch.device | None,
    failed: ValueError | None = None,
    side_by_side: Arrangement = "chain",
) -> T:
    """Run the program on every rank of a grid.

    It gives the first rank's result, under mpirun this one's.
    `failed` is what this rank cannot begin for, which the program tells the others.
    """
    comm: Any = launch.communicator()
    blocks, replicas = grid
    program = _explained(program)
    if comm is None:
        if failed is not None:
            raise AgreedError(str(failed))
        threads = torch.get_num_threads()
        if links.kind == "virtual":
            return run_virtual(blocks, program, Network.asked(links), threads, replicas)[0]
        return run_threads(blocks, program, threads, replicas=replicas)[0]
    from hybrid.links import probe
    from hybrid.links.mpi import run_mpi

    found = launch.ranks()
    local_rank = found.local_rank if found else 0
    direct = probe.agreed(links.gpu_aware, device, comm, local_rank)
    timeout = links.timeout
    if timeout is None:
        timeout = 1800.0 if "SLURM_JOB_ID" in os.environ else 0.0
    found_here = run_mpi(comm, program, device, direct.direct, timeout, replicas, side_by_side)
    return found_here[0]


def _explained(program: Program[T]) -> Program[T]:
    """The program, but for errors of code that was given to it: those say where they come from."""

    @wraps(program)
    def explained(links: RankLinks) -> T:
        try:
            return program(links)
        except (AgreedError, KeyboardInterrupt, StoppedError):
            raise
        except BaseException as error:
            cause, where = error.__cause__ or error, place(error.__cause__ or error)
            if isinstance(error, ValueError) and error.__cause__ is not None:
                text = one_line(error) + (f" ({where})" if where else "")
            elif where or not isinstance(error, Exception):
                text = format_error(error)
            else:
                raise
            # under mpirun the rank is named by whoever ends the job
            named = links.place.count > 1 and launch.communicator() is None
            raise CodeError(f"{_named(links.place)}: {text}" if named else text) from cause

    return explained


def _named(place: Place) -> str:
    of = f" of replica {place.replica}" if place.replicas > 1 else ""
    return f"block {place.block}{of}"
