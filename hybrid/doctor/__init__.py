"""What `hybrid doctor` looks at, and what to do about each finding."""

from collections.abc import Callable
from pathlib import Path

from hybrid.doctor import machine, ranks
from hybrid.doctor.machine import Finding
from hybrid.errors import one_line
from hybrid.ranks import launch


def report(say: Callable[[str], None], out: Path = Path()) -> None:
    """Say every finding, and what to do about it; `out` is a folder for runs. All ranks call it."""
    comm = launch.communicator()
    answer = ranks.hardware(), ranks.installed()
    answers = [answer] if comm is None else comm.allgather(answer)
    places, versions = zip(*answers, strict=True)
    folder = machine.run_folder(out, comm)
    checks: list[Callable[[], list[Finding]]] = [
        lambda: ranks.same_versions(versions),
        ranks.torchvision,
        ranks.library,
        machine.shared_memory,
        lambda: ranks.binding(places),
        ranks.gpus,
        lambda: ranks.gpu_sharing(places),
        lambda: folder,
    ]
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
