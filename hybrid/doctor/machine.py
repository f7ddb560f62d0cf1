"""What a machine gives its ranks: shared memory, folders that all of them see, and Slurm."""

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hybrid.errors import one_line
from hybrid.links.communicator import Communicator

T = TypeVar("T")
PATIENCE_SECONDS = 10.0
LEAST_SHARED_BYTES, LEAST_FREE_BYTES = 256 << 20, 1 << 30


class Finding(NamedTuple):
    """One line of the report; a remedy marks something to mend."""

    subject: str
    value: str
    remedy: str = ""


def answer_of(*command: str, seconds: float = PATIENCE_SECONDS) -> str | None:
    """What a program writes; None if it is not there, fails or takes longer."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        return str(subprocess.check_output(command, timeout=seconds, errors="replace", **streams))
    except (OSError, subprocess.SubprocessError):
        return None


def soon(look: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What `look` gives, or raises; OSError if that takes longer, as on a server that is down."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(look())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], seconds).done:
        raise OSError(f"no answer in {seconds:g} s")
    return answer.result()


def shared_memory() -> list[Finding]:
    """The shared memory of a host's ranks, where there is as little as in a container."""
    total = os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks
    remedy = "ranks of a node communicate through it: give more, docker run --shm-size=1g"
    little = Finding("/dev/shm", f"{total >> 20:,} MB", remedy)
    return [little] if total < LEAST_SHARED_BYTES else []


def run_folder(folder: Path) -> list[Finding]:
    """Whether runs can be written there, and how much of them."""

    def free_bytes() -> int:
        there = _existing(folder)
        with tempfile.TemporaryFile(dir=there):
            left = os.statvfs(there)
        return left.f_frsize * left.f_bavail

    try:
        free = soon(free_bytes)
    except OSError as error:
        remedy = "name a folder that can be written to, on a file system all nodes see, with --out"
        return [Finding("run folder", one_line(error), remedy)]
    remedy = "make room, or another folder with --out: a checkpoint must fit beside the last"
    text = f"{folder.absolute()}, {free / 1e9:,.1f} GB free (a quota does not show here)"
    return [Finding("run folder", text, remedy if free < LEAST_FREE_BYTES else "")]


def same_folder(folder: Path, comm: Communicator) -> list[Finding]:
    """Whether all ranks see what rank 0 writes. All ranks call it."""
    with ExitStack() as files:
        name = ""
        with suppress(OSError):
            there = soon(lambda: _existing(folder))
            make = partial(tempfile.NamedTemporaryFile, prefix=".hybrid-doctor-", dir=there)
            name = files.enter_context(soon(make)).name
        written = str(comm.bcast(name))
        sees = False
        with suppress(OSError):
            sees = bool(written) and soon(Path(written).exists)
        seen = comm.allgather(sees)
    if not written:
        return []  # that it cannot be written to is a finding of its own
    if all(seen):
        return [Finding("same folder", f"all {len(seen)} ranks see what rank 0 writes there")]
    remedy = "name a folder on a file system that all nodes mount, with --out"
    text = f"rank {seen.index(False)} does not see what rank 0 writes to {Path(written).parent}"
    return [Finding("same folder", text, remedy)]


def unreadable(folder: Path) -> str:
    """Why this rank cannot read the folder; empty if it can."""
    try:
        soon(lambda: next(iter(folder.iterdir()), None))
    except OSError as error:
        return one_line(error)
    return ""


def data_folder(folder: Path, named: bool, reasons: Sequence[str]) -> list[Finding]:
    """Whether every rank can read the data; a folder nobody named may be missing."""
    if not any(reasons):
        return [Finding("data", f"{folder}, read by every rank")]
    if not named and all(reasons):
        return [Finding("data", f"{folder} is not there; data sets are downloaded to it")]
    rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
    remedy = "put the data where every node sees it, and name the folder: export HYBRID_DATA=..."
    return [Finding("data", f"rank {rank} cannot read it: {why}", remedy)]


def slurm() -> list[Finding]:
    """Whether jobs can be submitted, and what the cluster does with those that end too early."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        remedy = "put Slurm's commands on PATH, or the job cannot requeue itself"
        inside = "SLURM_JOB_ID" in os.environ
        return [Finding("Slurm", "no sbatch and scontrol here", remedy if inside else "")]
    version = (answer_of("sbatch", "--version") or "installed, of unknown version").strip()
    configuration = answer_of("scontrol", "show", "config")
    if configuration is None:
        remedy = "hybrid submit needs it: run on a login node, or ask the site if that is no help"
        return [Finding("Slurm", f"{version}; its controller does not answer", remedy)]
    forbidden = re.search(r"^JobRequeue[ \t]*=[ \t]*0[ \t]*$", configuration, re.MULTILINE)
    text = f"{version}; a job is requeued only if it asks for it, as scripts do (JobRequeue=0)"
    remedy = "if jobs with --requeue are not requeued either: jobs/chain.sh, --max-requeues 0"
    return [Finding("Slurm", text, remedy) if forbidden else Finding("Slurm", version)]


def _existing(path: Path) -> Path:
    """The nearest folder of `path` that is there."""
    path = Path(os.path.abspath(path.expanduser()))
    return next(folder for folder in (path, *path.parents) if folder.exists()).resolve()
