"""The cores and GPUs that a rank may use, and those it shares."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import torch

from hybrid.doctor.finding import Finding, said
from hybrid.ranks import launch


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


def here() -> RankHardware:
    """Where this rank runs."""
    cpus, threads = sorted(os.sched_getaffinity(0)), launch.threads_per_rank(1)
    return RankHardware(
        platform.node(), cpus, threads, gpu_names(), os.getenv("CUDA_VISIBLE_DEVICES")
    )


def cores() -> list[Finding]:
    """The cores of this process, the threads that will run on them."""
    mine, threads = os.sched_getaffinity(0), launch.threads_per_rank(1)
    asked = os.environ.get("OMP_NUM_THREADS", threads)
    other = f", not OMP_NUM_THREADS={asked}" if str(asked) != str(threads) else ""
    remedy = "hybrid train sets its own; use --set train.threads=N to choose" if other else ""
    return [
        Finding("cores", f"{len(mine)} of {os.cpu_count()} usable by this process"),
        Finding("threads", f"{threads} for each rank{other}", remedy),
    ]


def gpus() -> list[Finding]:
    """What torch sees of the GPUs, and what the driver sees where torch sees none."""
    if torch.cuda.is_available():
        return [Finding("GPUs", ", ".join(gpu_names()))]
    listed = said("nvidia-smi", "-L") or ""
    there = sum(line.startswith("GPU ") for line in listed.splitlines())
    if not there:
        return [Finding("GPUs", "none visible to torch; blocks live on the CPU")]
    remedy = "install a CUDA build of torch that this driver can run, from pytorch.org"
    text = f"{there} in this host, none usable by torch {torch.__version__}"
    return [Finding("GPUs", text, remedy)]


def gpu_names() -> list[str]:
    """Names of the visible GPUs; none where CUDA fails."""
    with suppress(RuntimeError, AssertionError):
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return []


def binding(places: Sequence[RankHardware]) -> list[Finding]:
    """Whether the ranks of a host have enough cores, and each its own."""
    for host, here in _by_host(places):
        cpus = set[int]().union(*(place.cpus for place in here))
        threads = sum(place.threads for place in here)
        if threads > len(cpus):
            own = "mpirun --map-by ppr:RANKS:node:pe=CORES --bind-to core"
            remedy = f"start fewer ranks a node, or bind each to cores of its own: {own}"
            text = f"{len(here)} ranks with {threads} threads share {len(cpus)} cores of {host}"
            return [Finding("binding", text, remedy)]
    return [Finding("binding", "one core for each thread on every host")]


def gpu_sharing(places: Sequence[RankHardware]) -> list[Finding]:
    """Whether ranks share a GPU, or cannot reach those of their neighbors."""
    found = []
    for host, here in _by_host(places):
        numbers = {len(place.gpus) for place in here}
        most, visible = max(numbers), {place.visible for place in here}
        if 0 in numbers and most:
            remedy = "ask for one GPU for each rank on every node: --gpus-per-rank 1"
            found.append(Finding("GPU ranks", f"some ranks of {host} see none", remedy))
        if numbers == {1} and len(visible) == len(here) > 1:
            remedy = "ask for GPUs by node, not by task: --gpus-per-node (each rank takes its own)"
            text = f"each rank of {host} sees only its own, which breaks copies between GPUs"
            found.append(Finding("GPU view", text, remedy))
        elif len(here) > most > 0:
            remedy = "blocks share a GPU: start at most one rank for each GPU of a host"
            text = f"{len(here)} ranks, {most} GPUs on {host}"
            found.append(Finding("GPU sharing", text, remedy))
    return found


def _by_host(places: Sequence[RankHardware]) -> Iterator[tuple[str, list[RankHardware]]]:
    for host, here in groupby(sorted(places, key=lambda x: x.host), lambda x: x.host):
        yield host, list(here)
