"""What `hybrid doctor` looks at, and what to do about each finding."""

import os
from collections.abc import Callable
from pathlib import Path

from hybrid.doctor import machine, ranks
from hybrid.doctor.machine import Finding
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
    answer = ranks.hardware(), ranks.installed(), machine.unreadable(data)
    answers = [answer] if comm is None else comm.allgather(answer)
    places, versions, reasons = zip(*answers, strict=True)
    checks: list[Callable[[], list[Finding]]] = [
        lambda: ranks.same_versions(versions),
        ranks.mpirun,
        ranks.library,
        machine.shared_memory,
        lambda: ranks.binding(places),
        ranks.gpus,
        lambda: ranks.gpu_sharing(places),
        lambda: machine.run_folder(out),
        lambda: machine.data_folder(data, named, reasons),
        machine.slurm,
    ]
    if comm is not None:
        seen = machine.same_folder(out, comm)
        checks.append(lambda: seen)
    if comm is None or comm.rank == 0:
        for check in checks:
            try:
                findings = check()
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error)}"
                findings = [Finding("doctor", f"cannot look: {why}")]
            for subject, value, remedy in findings:
                say(f"{'!' if remedy else ' '} {subject:<12} {value}")
                if remedy:
                    say(f"    -> {remedy}")
    if comm is not None:
        comm.barrier()
