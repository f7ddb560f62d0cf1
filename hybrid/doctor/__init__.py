"""What `hybrid doctor` looks at, and what to do about each finding."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.doctor import batch, cores, mpi, storage, versions
from hybrid.doctor.finding import Finding
from hybrid.errors import one_line
from hybrid.ranks import launch

__all__ = ["Finding", "report"]

CLOCK_SECONDS = 1.0
"""Clocks further apart than this make logs and file times misleading."""


class Rank(NamedTuple):
    """What each rank tells of itself."""

    place: cores.Place
    installed: dict[str, str]
    data: storage.Seen
    start_seconds: float
    clock: float


def report(say: Callable[[str], None], out: Path = Path(), data: Path | None = None) -> None:
    """Say every finding, and what to do about it. All ranks call it.

    `out` is a folder for runs, `data` that of the data sets, else $HYBRID_DATA.
    """
    named = data is not None or bool(os.environ.get("HYBRID_DATA"))
    data = data or Path(os.environ.get("HYBRID_DATA") or "~/.cache/hybrid").expanduser()
    comm = launch.communicator()
    here = launch.ranks()
    ranks = _everyone(comm, data)
    hosts = len({rank.place.host for rank in ranks})
    checks: list[Callable[[], list[Finding]]] = [
        lambda: versions.versions(ranks[0].installed),
        mpi.mpirun,
        mpi.library,
        lambda: mpi.hosts(here.heartbeat if here else None),
        lambda: mpi.gpu_aware(os.environ),
        lambda: mpi.container(os.environ),
        cores.cores,
        cores.gpus,
        lambda: storage.run_folder(out, hosts),
        lambda: storage.data_folder(data, named, [rank.data for rank in ranks]),
        lambda: storage.homes(os.environ),
        lambda: storage.start_time(max(rank.start_seconds for rank in ranks)),
        lambda: batch.slurm(os.environ),
    ]
    places = [rank.place for rank in ranks]
    if comm is not None:
        seen = storage.same_folder(out, lambda name: str(comm.bcast(name)), comm.allgather)
        checks += [
            lambda: seen,
            lambda: versions.same_versions([rank.installed for rank in ranks]),
            lambda: clocks([(rank.place.host, rank.clock) for rank in ranks]),
            lambda: cores.binding(places),
            lambda: cores.gpu_sharing(places),
            lambda: [rank_line(number, there) for number, there in enumerate(places)],
        ]
    if comm is None or comm.rank == 0:
        for check in checks:
            for finding in _safely(check):
                _say(say, finding)
    if comm is not None:
        comm.Barrier()


def clocks(ranks: list[tuple[str, float]]) -> list[Finding]:
    """How far the hosts' clocks, read at once, are apart."""
    early, late = min(ranks, key=lambda rank: rank[1]), max(ranks, key=lambda rank: rank[1])
    apart = late[1] - early[1]
    if apart <= CLOCK_SECONDS:
        return [Finding("clocks", f"at most {apart:.2f} s apart")]
    remedy = "logs and file times mislead: ask the site to run NTP on its nodes"
    return [Finding("clocks", f"{late[0]} is {apart:.1f} s ahead of {early[0]}", remedy)]


def rank_line(number: int, place: cores.Place) -> Finding:
    """Where a rank runs, on what."""
    cpus = ",".join(map(str, place.cpus))
    gpus = f", {len(place.gpus)} GPU(s)" if place.gpus else ""
    text = f"{number} on {place.host}, cores {cpus}, {place.threads} thread(s){gpus}"
    return Finding("rank", text)


def _everyone(comm: Any, data: Path) -> list[Rank]:
    """Every rank's own facts, by rank. All ranks call it."""
    age = storage.seconds_since_start()
    mine = Rank(
        cores.Place(
            platform.node(),
            sorted(os.sched_getaffinity(0)),
            launch.threads_per_rank(1),
            cores.gpu_names(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
        ),
        versions.installed(),
        storage.readable(data),
        age,
        0.0,
    )
    if comm is None:
        return [mine]
    comm.Barrier()
    gathered: list[Rank] = comm.allgather(mine._replace(clock=time.time()))
    return gathered


def _safely(check: Callable[[], list[Finding]]) -> list[Finding]:
    """The check's findings; what it stumbles over is one."""
    try:
        return check()
    except Exception as error:
        return [Finding("doctor", f"cannot look: {type(error).__name__}: {one_line(error)}")]


def _say(say: Callable[[str], None], finding: Finding) -> None:
    say(f"{'!' if finding.remedy else ' '} {finding.subject:<12} {finding.value}")
    if finding.remedy:
        say(f"    -> {finding.remedy}")
