"""What `hybrid doctor` looks at, and what to do about each finding."""

import os
from collections.abc import Callable
from pathlib import Path

from hybrid.doctor import batch, cores, mpi, storage, versions
from hybrid.doctor.finding import Finding
from hybrid.errors import one_line
from hybrid.ranks import launch

__all__ = ["Finding", "report"]


def report(say: Callable[[str], None], out: Path = Path(), data: Path | None = None) -> None:
    """Say every finding, and what to do about it. All ranks call it.

    `out` is a folder for runs, `data` that of the data sets, else $HYBRID_DATA.
    """
    named = data is not None or bool(os.environ.get("HYBRID_DATA"))
    data = data or Path(os.environ.get("HYBRID_DATA") or "~/.cache/hybrid").expanduser()
    comm = launch.communicator()
    mine = cores.here(), versions.installed(), storage.readable(data)
    everyone = [mine] if comm is None else comm.allgather(mine)
    places, installed, read = zip(*everyone, strict=True)
    checks: list[Callable[[], list[Finding]]] = [
        lambda: versions.versions(installed[0]),
        mpi.mpirun,
        mpi.library,
        mpi.killed,
        mpi.shared_memory,
        cores.cores,
        cores.gpus,
        lambda: storage.run_folder(out, len({place.host for place in places})),
        lambda: storage.data_folder(data, named, read),
        lambda: storage.homes(os.environ),
        lambda: batch.slurm(os.environ),
    ]
    if comm is not None:
        seen = storage.same_folder(out, lambda name: str(comm.bcast(name)), comm.allgather)
        checks += [
            lambda: seen,
            lambda: versions.same_versions(installed),
            lambda: cores.binding(places),
            lambda: cores.gpu_sharing(places),
            lambda: [Finding("rank", f"{rank} on {place}") for rank, place in enumerate(places)],
        ]
    if comm is None or comm.rank == 0:
        for check in checks:
            try:
                found = check()
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error)}"
                found = [Finding("doctor", f"cannot look: {why}")]
            for subject, value, remedy in found:
                say(f"{'!' if remedy else ' '} {subject:<12} {value}")
                if remedy:
                    say(f"    -> {remedy}")
    if comm is not None:
        comm.barrier()
