"""The checks of `hybrid doctor`, with a remedy for each problem."""

from collections.abc import Callable
from pathlib import Path

from hybrid.doctor import checks
from hybrid.doctor.checks import Finding
from hybrid.errors import one_line
from hybrid.ranks import launch


def report(say: Callable[[str], None], out: Path = Path()) -> None:
    """Report every finding and its remedy; `out` is a folder for runs. All ranks call it."""
    comm = launch.communicator()
    answer = checks.hardware(), checks.installed()
    answers = [answer] if comm is None else comm.allgather(answer)
    places, versions = zip(*answers, strict=True)
    folder, transport = checks.run_folder(out, comm), checks.transport(comm)
    rank_0_checks: list[Callable[[], list[Finding]]] = [
        lambda: checks.same_versions(versions),
        checks.torchvision,
        checks.library,
        checks.shared_memory,
        lambda: checks.binding(places),
        checks.gpus,
        lambda: checks.gpu_sharing(places),
        lambda: transport,
        lambda: folder,
    ]
    if comm is None or comm.rank == 0:
        for check in rank_0_checks:
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
