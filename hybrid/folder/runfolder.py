"""The run folder and its files. Apart from checkpoints and traces, only rank 0 writes to it."""

import json
import os
import platform
import shlex
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

from hybrid.errors import given_by
from hybrid.files import (
    MOST_OF_LINES,
    check_file,
    check_folder,
    check_link,
    naming,
    read_lines,
    read_whole,
    remove,
    write_atomically,
)
from hybrid.folder import checkpoint, traces
from hybrid.folder.board import Board
from hybrid.folder.lock import Lock, check_owner

MOST_BYTES = 1 << 24
"""The largest summary, and the largest file of starts, that is read.

A summary of a thousand ranks has 0.3 MB, a start of 4,096 ranks 0.06.
"""
MOST_STARTS = 250
"""The starts that are kept, the newest ones."""
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
COURSE = ("config.toml", "starts.jsonl", METRICS)
"""The files that a run goes on with, beside its checkpoints."""
_FILES = (*COURSE, SUMMARY, "trace.json")
DISTRIBUTION = "hybrid-blocks"
"""This package's name where packages are installed from."""
PACKAGES = ("torch", "numpy", "safetensors", "mpi4py", "cupy-cuda12x", "cupy-cuda13x")
"""The packages that the bits of a run may depend on."""


class RunFolder:
    """Settings, starts, metrics and summary, each a file; `checkpoints/`, `events/`, `traces/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.events = path / "events"
        self.token = ""
        """Of this run's ownership, which every rank is told; empty without one."""
        self._lock: Lock | None = None
        self._metrics: Any = None
        self._board: Board | None = None

    def claim(self) -> str:
        """Own the folder until `release`; give the token of this ownership.

        Raises ValueError if another run that is alive owns it, OSError if it cannot be written to.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the run folder is {str(self.path)!r}; its name must be UTF-8"
            ) from None
        check_folder(self.path.resolve())  # it may be a link itself
        self._lock = Lock(self.path)
        self.token = self._lock.token
        return self.token

    def release(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_owner(self) -> None:
        """ValueError if this run has lost the folder; every rank asks before it writes."""
        if self.token:
            check_owner(self.path, self.token)

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        return next(reversed(checkpoint.complete(self.checkpoints)), None)

    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json, which a run that has ended leaves; None without it."""
        try:
            content = json.loads(read_whole(self.path / SUMMARY, MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) else None

    def check_links(self) -> None:
        """Raise ValueError for a link within the folder where the run would write.

        It may lead anywhere. The folder itself may be a link, for instance to a scratch disk.
        """
        for name in _FILES:
            check_file(self.path / name)
        for folder in (self.checkpoints, self.events, self.path / traces.FOLDER):
            check_folder(folder)
            for inside in folder.iterdir() if folder.exists() else ():
                (check_file if inside.suffix == ".json" else check_link)(inside)

    def check(self, resume: bool, first: bool = True) -> None:
        """Raise ValueError if a new run would start in a run's folder, or none can be resumed.

        A folder that is not the `first` disk's needs no checkpoint.
        """
        self.check_links()
        if resume and first and self.newest() is None:
            raise ValueError(f"{self.path} has no checkpoint to resume from: start a new run")
        metrics = self.path / METRICS
        if not resume and metrics.exists() and (metrics.stat().st_size or self.newest()):
            way = (
                f"give {given_by('--resume', 'resume=True')} to go on with it"
                if self.newest()
                else "remove it (no checkpoint)"
            )
            raise ValueError(f"{self.path} already holds a run: {way}; or choose another folder")

    def open(
        self, config: str, from_step: int, rollbacks: int = 0, hosts: Sequence[str] = ()
    ) -> None:
        """Write the settings, and continue after step `from_step`.

        `rollbacks` is the number of roll-backs before it, `hosts` are the hosts of the ranks.
        """
        self.clear()
        write_atomically(self.path / "config.toml", config)
        starts = deque(self._lines("starts.jsonl", MOST_BYTES) if from_step else (), MOST_STARTS)
        starts.append(json.dumps(origin(hosts, from_step)) + "\n")
        write_atomically(self.path / "starts.jsonl", "".join(starts))
        self._write_course(from_step, rollbacks)
        self._metrics = (self.path / METRICS).open("a", buffering=1)
        self._board = Board(self.events, from_step)

    def clear(self) -> None:
        """Remove what a killed run has left, and the summary of the run that goes on."""
        self.check_owner()
        for folder in (self.path, self.path / traces.FOLDER, self.checkpoints):
            for partial in folder.glob(".*.partial"):
                remove(partial)
        (self.path / SUMMARY).unlink(missing_ok=True)

    def rewind(self, to_step: int) -> None:
        """Continue after step `to_step`, to which the run was rolled back.

        Later lines stay until the run has ended: a resumed run may continue from one of them.
        """
        self.check_owner()
        if self._board is not None:
            self._board.close()
        self._board = Board(self.events, to_step)

    def metric(self, line: Mapping[str, Any]) -> None:
        """Append one object to metrics.jsonl and its numbers to TensorBoard."""
        self.check_owner()
        with naming(self.path / METRICS):
            self._metrics.write(json.dumps(line) + "\n")
        if self._board is not None:
            self._board.add(line)

    def notice(self) -> str:
        """Warn the user, once, of a file that cannot be written; else empty."""
        notice = "" if self._board is None else self._board.notice
        self._board = None if notice else self._board
        return notice

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """End the run's files and, if it has succeeded, write the summary.

        The summary marks the end of the run, so it is written last: if the disk is full before, a
        resumed run only has to repeat this.
        """
        self.check_owner()
        self._metrics.close()
        if self._board is not None:
            self._board.close()
        if summary is not None:
            self._write_course()
            write_atomically(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")

    def _write_course(self, last_step: float = inf, most_rollbacks: float = inf) -> None:
        """Write the lines of metrics again that are of the run's present course."""
        lines = _course(self._lines(METRICS), last_step, most_rollbacks)
        write_atomically(self.path / METRICS, "".join(lines))

    def _lines(self, name: str, most: int = MOST_OF_LINES) -> Iterator[str]:
        """Read the whole lines of a file of at most `most` bytes, if it exists."""
        path = self.path / name
        lines = read_lines(path, most) if path.exists() else ()
        return (line.decode(errors="replace") for line in lines if line.endswith(b"}\n"))


def _course(lines: Iterable[str], last_step: float, most_rollbacks: float) -> list[str]:
    """The lines that led to `last_step`, without those that roll-backs have discarded."""
    course: list[tuple[int, str]] = []
    rollbacks = 0
    for number, line in enumerate(lines, 1):
        try:
            metric = json.loads(line)
            step, phase = int(metric["step"]), metric["phase"]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ValueError(
                f"line {number} of metrics.jsonl is no metric: remove the line to continue"
            ) from None
        if phase == "rollback":
            rollbacks += 1
            if rollbacks > most_rollbacks:
                break
            course = [entry for entry in course if entry[0] <= step]
        course.append((step, line))
    return [line for step, line in course if step <= last_step]


def origin(hosts: Sequence[str], step: int) -> dict[str, Any]:
    """The origin, for JSON, of a run that starts at `step` on ranks of these hosts, in order."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "command": shlex.join(sys.argv),
        "hosts": list(hosts),
        "version": version_of(DISTRIBUTION),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: number for name in PACKAGES if (number := version_of(name))},
        "system": platform.platform(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def commit() -> str | None:
    """The commit of this package's sources, if they are in a repository."""
    git = Path(__file__).parents[2] / ".git"
    # read by hand: MPI libraries may not survive a fork
    with suppress(OSError, ValueError):
        head = (git / "HEAD").read_text().strip()
        ref = head.partition("ref: ")[2]
        if not ref or (git / ref).is_file():
            return (git / ref).read_text().strip() if ref else head
        packed = (git / "packed-refs").read_text().split()
        return packed[packed.index(ref) - 1]
    return None


def version_of(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
