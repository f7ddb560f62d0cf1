"""Start a program on every rank of a grid, on any links."""

from functools import wraps
from typing import TypeVar

import torch

from hybrid.errors import AgreedError, CodeError, StoppedError, code_line, format_error, one_line
from hybrid.links import RankLinks
from hybrid.links.base import Program, Start
from hybrid.links.gpus import links_between
from hybrid.links.grid import Arrangement, Grid
from hybrid.ranks import launch
from hybrid.registries import AUTO, LINKS
from hybrid.settings.config import LinkSettings
from hybrid.solvers.acting import Facts, check

T = TypeVar("T")


def start(
    program: Program[T],
    grid: Grid,
    settings: LinkSettings,
    device: torch.device | None,
    failed: ValueError | None = None,
    side_by_side: Arrangement = "chain",
) -> T:
    """Run the program on every rank of a grid; return the result of this process's first rank.

    `failed` is the reason why this rank cannot begin, which the program tells the others.
    """
    comm, links = launch.communicator(), link_class(settings)
    if failed is not None and (links.in_one_process or comm is None):
        raise AgreedError(str(failed))  # there are no others to tell
    begin = Start(grid, settings, device, side_by_side, comm)
    links = links_between(links, begin, failed is not None)
    return links.start(_with_code_lines(program), begin)


def link_class(settings: LinkSettings) -> type[RankLinks]:
    """Return the class of the links between the ranks of this job."""
    links: type[RankLinks] = LINKS[launch.joined_by() if settings.kind == AUTO else settings.kind]
    return links


def check_links(settings: LinkSettings, ranks: int) -> None:
    """Reject links that cannot connect these ranks, and settings that these links do not read.

    `ranks` is the number of ranks that a launcher has started, 0 without one.
    """
    kind, device = settings.kind, settings.device
    if kind == AUTO:
        read = LINKS["torch"].settings
    elif LINKS[kind].in_one_process and ranks:
        raise ValueError(
            f"links.kind is {kind!r}, which runs in one process, but a launcher has started "
            f"{ranks} MPI rank{'s' * (ranks > 1)}: start it without mpirun"
        )
    elif not (LINKS[kind].in_one_process or ranks):
        raise ValueError(
            f"links.kind is {kind!r}, whose ranks are processes, and no launcher has started any: "
            "start it with mpirun -n RANKS, or leave links.kind out for threads"
        )
    elif LINKS[kind].over_mpi and launch.joined_by() == "torch":
        raise ValueError(
            f"links.kind is {kind!r}, but these {ranks} ranks were started without MPI: start them "
            f"with mpirun -n {ranks}, or leave links.kind out"
        )
    else:
        read = LINKS[kind].settings
    by_mpi = ranks and launch.joined_by() == "mpi" and kind in (AUTO, "mpi")
    if device == "nccl" and (kind not in (AUTO, "torch") or not ranks):
        raise ValueError(
            "links.device is 'nccl', which connects processes that links.kind auto or torch joins: "
            "start them with mpirun, srun or torchrun, or leave it out"
        )
    if device == "mpi" and not by_mpi:
        raise ValueError(
            "links.device is 'mpi', which needs ranks joined by MPI: start them with mpirun or "
            "srun and leave links.kind out, or choose auto or host"
        )
    check({"links": settings}, Facts(link_settings=read))


def _with_code_lines(program: Program[T]) -> Program[T]:
    """Wrap the program so that an error from user code names the line."""

    @wraps(program)
    def run(links: RankLinks) -> T:
        try:
            return program(links)
        except (AgreedError, KeyboardInterrupt, StoppedError):
            raise
        except BaseException as error:
            cause, where = error.__cause__ or error, code_line(error.__cause__ or error)
            if isinstance(error, ValueError) and error.__cause__ is not None:
                text = one_line(error) + (f" ({where})" if where else "")
            elif where or not isinstance(error, Exception):
                text = format_error(error)
            else:
                raise
            # under a launcher, `abort` names the rank
            names_place = links.place.count > 1 and launch.communicator() is None
            raise CodeError(f"{links.place}: {text}" if names_place else text) from cause

    return run
