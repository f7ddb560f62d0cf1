"""The file systems that a training reads and writes: what they are, how fast, and who sees them."""

import os
import site
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from hybrid.doctor.finding import Finding, soon
from hybrid.errors import one_line

MOUNTS = Path("/proc/mounts")
HOME_LIKE = {"nfs", "nfs4", "afs", "cifs", "smb3", "smbfs", "fuse.sshfs"}
"""Those that are slow with many small files; parallel file systems are built for big ones."""
NETWORK = HOME_LIKE | {
    *("9p", "beegfs", "ceph", "fuse.glusterfs", "gpfs", "lustre", "panfs", "virtiofs", "wekafs")
}
LEAST_FREE_BYTES = 1 << 30
SLOW_SECONDS = 1.0
PROBE_BYTES = 4 << 20


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system of `path`, and whether it is on a network."""
    kind, longest = "unknown", -1
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return kind
    where = str(soon(lambda: _existing(path)))
    for _, point, found, *_ in (words for line in lines if len(words := line.split()) > 2):
        point = point.replace("\\040", " ").rstrip("/")
        if f"{where}/".startswith(f"{point}/") and len(point) >= longest:
            kind, longest = found, len(point)
    return f"{kind}, {'a network file system' if kind in NETWORK else 'of this host'}"


def run_folder(folder: Path, hosts: int = 1, mounts: Path = MOUNTS) -> list[Finding]:
    """Where runs are written: file system, free space, and what a durable write costs."""
    try:
        folder = Path(os.path.abspath(folder.expanduser()))
        where = file_system(folder, mounts)
        remedy = ""
        if hosts > 1 and "of this host" in where:
            remedy = f"{hosts} hosts write here: name a folder on scratch that all see, with --out"
        found = [Finding("run folder", f"{folder} ({where})", remedy)]
        there = soon(lambda: _existing(folder))
        return found + soon(lambda: [*free_space(there), *durable_write(there)])
    except OSError as error:
        remedy = "name a folder that can be written to, on a file system all nodes see, with --out"
        return [Finding("run folder", one_line(error), remedy)]


def free_space(folder: Path) -> list[Finding]:
    """Free bytes and files; quotas do not show."""
    left = os.statvfs(folder)
    free, full = left.f_frsize * left.f_bavail, left.f_files and not left.f_favail
    files = ", and no file more" if full else ""
    remedy = "make room, or another folder with --out: a checkpoint must fit beside the last"
    text = f"{free / 1e9:,.1f} GB (a quota does not show here){files}"
    return [Finding("free space", text, remedy if full or free < LEAST_FREE_BYTES else "")]


def durable_write(folder: Path) -> list[Finding]:
    """The time until a file of 4 MB is on the disk, as each file of a checkpoint must be."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.monotonic()
        file.write(bytes(PROBE_BYTES))
        os.fsync(file.fileno())
        seconds = time.monotonic() - began
    remedy = "checkpoints wait for it: another file system, or a larger checkpoint.every"
    text = f"{PROBE_BYTES >> 20} MB on the disk in {seconds * 1e3:,.0f} ms"
    return [Finding("fsync", text, remedy if seconds > SLOW_SECONDS else "")]


def homes(environment: Mapping[str, str], mounts: Path = MOUNTS) -> list[Finding]:
    """Python, caches and temporary files on file systems that are too slow for them, or shared."""
    on_node = "point it to the node's own disk in the job script: export"
    python = "many ranks import from there at once: a container, or a copy on scratch"
    scratch = environment.get("TMPDIR") or "/tmp"
    checks = [
        ("Python", next(iter(site.getsitepackages()), "/"), python),
        # unset, a private folder in TMPDIR (hybrid.ranks.launch)
        ("CuPy cache", environment.get("CUPY_CACHE_DIR", scratch), "unset CUPY_CACHE_DIR"),
        ("TMPDIR", scratch, f"{on_node} TMPDIR=/tmp"),
    ]
    found = []
    for subject, named, remedy in checks:
        path = Path(named).expanduser()
        try:
            where = file_system(path, mounts)
        except OSError as error:
            found.append(Finding(subject, f"{path}: {error}", "ask the site; its server is down?"))
            continue
        slow = where.partition(",")[0] in (HOME_LIKE if subject == "Python" else NETWORK)
        if subject == "TMPDIR" and not os.access(path, os.W_OK | os.X_OK):
            slow, where = True, "not a folder that can be written to"
        found.append(Finding(subject, f"{path} ({where})", remedy if slow else ""))
    return found


def readable(folder: Path, mounts: Path = MOUNTS) -> tuple[str, str]:
    """The file system of the data in `folder`, and why this rank cannot read it."""
    try:
        kind = file_system(folder, mounts)
        soon(lambda: next(iter(folder.iterdir()), None))
        return kind, ""
    except OSError as error:
        return "", one_line(error)


def data_folder(folder: Path, named: bool, ranks: Sequence[tuple[str, str]]) -> list[Finding]:
    """Whether every rank can read the data; a folder nobody named may be missing."""
    lacking = [f"rank {rank} cannot read it: {why}" for rank, (_, why) in enumerate(ranks) if why]
    if not lacking:
        return [Finding("data", f"{folder} ({ranks[0][0]}), read by {_all(len(ranks))}")]
    if not named and len(lacking) == len(ranks):
        return [Finding("data", f"{folder} is not there; data sets are downloaded to it")]
    remedy = "put the data where every node sees it, and name the folder: export HYBRID_DATA=..."
    return [Finding("data", lacking[0], remedy)]


def same_folder(
    folder: Path, share: Callable[[str], str], gather: Callable[[bool], list[bool]]
) -> list[Finding]:
    """Whether all ranks see what rank 0 writes. All ranks call it.

    `share` gives every rank rank 0's text, `gather` every rank's answer.
    """
    with ExitStack() as files:
        name = ""
        with suppress(OSError):
            there = soon(lambda: _existing(folder))
            make = partial(tempfile.NamedTemporaryFile, prefix=".hybrid-doctor-", dir=there)
            name = files.enter_context(soon(make)).name
        written = share(name)
        sees = False
        with suppress(OSError):
            sees = bool(written) and soon(Path(written).exists)
        seen = gather(sees)
    if not written:
        return []  # that it cannot be written to is a finding of its own
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if not blind:
        return [Finding("same folder", f"{_all(len(seen))} see what rank 0 writes there")]
    remedy = "name a folder on a file system that all nodes mount, with --out"
    text = f"rank {blind[0]} does not see what rank 0 writes to {Path(written).parent}"
    return [Finding("same folder", text, remedy)]


def _existing(path: Path) -> Path:
    """The nearest folder of `path` that is there."""
    path = Path(os.path.abspath(path.expanduser()))
    return next(folder for folder in (path, *path.parents) if folder.exists()).resolve()


def _all(ranks: int) -> str:
    return f"all {ranks} ranks" if ranks > 1 else "this process"
