"""The file systems that a training reads and writes: what they are, how fast, and who sees them."""

import os
import site
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hybrid.doctor.finding import Finding, soon
from hybrid.errors import one_line

MOUNTS = Path("/proc/mounts")
NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre",
    "nfs", "nfs4", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
HOME_LIKE = {"nfs", "nfs4", "afs", "cifs", "smb3", "smbfs", "fuse.sshfs"}
"""Those that are slow with many small files; parallel file systems are built for big ones."""
LEAST_FREE_BYTES = 1 << 30
SLOW_SECONDS, SLOW_START_SECONDS = 1.0, 20.0
PROBE_BYTES = 4 << 20


class Seen(NamedTuple):
    """What a rank found at a path."""

    kind: str
    """Type of the file system."""
    error: str = ""


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that holds `path`, by the text of /proc/mounts."""
    kind, longest = "unknown", -1
    where = str(path)
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ").rstrip("/")
        if (where == point or where.startswith(f"{point}/")) and len(point) >= longest:
            kind, longest = parts[2], len(point)
    return kind


def place(path: Path, mounts_file: Path = MOUNTS) -> str:
    """Whether `path` is on a network, in words that begin with its file system's type."""
    try:
        mounts = mounts_file.read_text(errors="replace")
    except OSError:
        return "unknown"
    kind = file_system(soon(lambda: _existing(path)), mounts)
    return f"{kind}, {'a network file system' if kind in NETWORK else 'of this host'}"


def run_folder(folder: Path, hosts: int = 1, mounts: Path = MOUNTS) -> list[Finding]:
    """Where runs are written: file system, free space, and what a durable write costs."""
    try:
        folder = Path(os.path.abspath(folder.expanduser()))
        where = place(folder, mounts)
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
    free = left.f_frsize * left.f_bavail
    text = f"{free / 1e9:,.1f} GB (a quota does not show here)"
    if free < LEAST_FREE_BYTES or (left.f_files and not left.f_favail):
        files = "" if left.f_favail or not left.f_files else ", and no file more"
        remedy = "make room, or another folder with --out: a checkpoint must fit beside the last"
        return [Finding("free space", text + files, remedy)]
    return [Finding("free space", text)]


def durable_write(folder: Path) -> list[Finding]:
    """The time until a file of 4 MB is on the disk, as each file of a checkpoint must be."""
    descriptor, name = tempfile.mkstemp(prefix=".hybrid-doctor-", dir=folder)
    try:
        began = time.monotonic()
        os.write(descriptor, b"\0" * PROBE_BYTES)
        os.fsync(descriptor)
        seconds = time.monotonic() - began
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(name)
    remedy = "checkpoints wait for it: another file system, or a larger checkpoint.every"
    text = f"{PROBE_BYTES >> 20} MB on the disk in {seconds * 1e3:,.0f} ms"
    return [Finding("fsync", text, remedy if seconds > SLOW_SECONDS else "")]


def homes(environment: Mapping[str, str], mounts: Path = MOUNTS) -> list[Finding]:
    """Home, Python and temporary files: what is slow or shared where it should not be."""
    python = Path(sys.prefix)
    packages = Path(next(iter(site.getsitepackages()), sys.prefix))
    cache = environment.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")
    temporary = Path(environment.get("TMPDIR") or "/tmp")
    on_node = "point it to the node's own disk in the job script: "
    checks = [
        ("HOME", Path(environment.get("HOME", "/")), ""),
        ("Python", packages, "many ranks import from there at once: a container, or a copy on "
         f"scratch, of {python}"),
        ("CuPy cache", Path(cache).expanduser(), f"{on_node}export CUPY_CACHE_DIR=/tmp/cupy-$USER"),
        ("TMPDIR", temporary, f"{on_node}export TMPDIR=/tmp"),
    ]  # fmt: skip
    found = []
    for subject, path, remedy in checks:
        try:
            where = place(path, mounts)
        except OSError as error:
            found.append(Finding(subject, f"{path}: {error}", "ask the site; its server is down?"))
            continue
        kind = where.partition(",")[0]
        slow = kind in (HOME_LIKE if subject == "Python" else NETWORK)
        if subject == "TMPDIR" and not os.access(path, os.W_OK | os.X_OK):
            slow, where = True, "not a folder that can be written to"
        found.append(Finding(subject, f"{path} ({where})", remedy if slow else ""))
    return found


def start_time(seconds: float) -> list[Finding]:
    """How long Python took to begin, on the slowest rank."""
    remedy = "modules come slowly; from a network file system? A container, or Python on scratch"
    slow = remedy if seconds > SLOW_START_SECONDS else ""
    return [Finding("start", f"{seconds:.1f} s until all modules were imported", slow)]


def seconds_since_start(process: Path = Path("/proc/self/stat")) -> float:
    """Age of this process; 0 where the system does not tell."""
    try:
        ticks = int(process.read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def readable(folder: Path, mounts: Path = MOUNTS) -> Seen:
    """Whether this rank can read the data in `folder`."""
    try:
        kind = place(folder, mounts)
        soon(lambda: next(iter(folder.iterdir()), None))
        return Seen(kind)
    except OSError as error:
        return Seen("", one_line(error))


def data_folder(folder: Path, named: bool, ranks: Sequence[Seen]) -> list[Finding]:
    """Whether every rank can read the data; a folder nobody named may be missing."""
    lacking = [(rank, seen) for rank, seen in enumerate(ranks) if seen.error]
    if not lacking:
        return [Finding("data", f"{folder} ({ranks[0].kind}), read by {_all(len(ranks))}")]
    if not named and len(lacking) == len(ranks):
        return [Finding("data", f"{folder} is not there; data sets are downloaded to it")]
    rank, seen = lacking[0]
    remedy = "put the data where every node sees it, and name the folder: export HYBRID_DATA=..."
    return [Finding("data", f"rank {rank} cannot read it: {seen.error}", remedy)]


def same_folder(folder: Path, share: Callable[[str], str], gather: Callable[[bool], list[bool]]
) -> list[Finding]:  # fmt: skip
    """Whether all ranks see what rank 0 writes. All ranks call it.

    `share` gives every rank rank 0's text, `gather` every rank's answer.
    """
    name, descriptor = "", -1
    with suppress(OSError):
        descriptor, name = soon(
            lambda: tempfile.mkstemp(prefix=".hybrid-doctor-", dir=_existing(folder))
        )
    written = share(name)
    try:
        seen = gather(bool(written) and _sees(Path(written)))
    finally:
        if name:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(name)
    if not written:
        return []  # that it cannot be written to is a finding of its own
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if not blind:
        return [Finding("same folder", f"{_all(len(seen))} see what rank 0 writes there")]
    remedy = "name a folder on a file system that all nodes mount, with --out"
    text = f"rank {blind[0]} does not see what rank 0 writes to {Path(written).parent}"
    return [Finding("same folder", text, remedy)]


def _sees(path: Path) -> bool:
    with suppress(OSError):
        return soon(path.exists)
    return False


def _existing(path: Path) -> Path:
    """The nearest folder of `path` that is there."""
    path = Path(os.path.abspath(path.expanduser()))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.resolve()


def _all(ranks: int) -> str:
    return f"all {ranks} ranks" if ranks > 1 else "this process"
