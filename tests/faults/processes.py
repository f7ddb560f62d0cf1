"""Processes under test: started with or without mpirun, watched through /proc."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests.support.ranks import job_processes
from tests.support.ranks.world import for_mpirun

PROGRAM = "tests.faults.program"
_ROOT = Path(__file__).parents[2]
_FORKING = multiprocessing.get_context("forkserver")
_NUMBERS = count()
_OF_TORCHRUN = re.compile(
    r"^Traceback .*\n  File \"\S*bin/torchrun\"(?:.*\n)*?\S*\.(?:\w+Error|SignalException).*\n",
    re.M,
)
_ROOT_CAUSE = re.compile(r"Root Cause.*(?:\n.*)*?exitcode\s*: (-?\d+)")
_SLOW = "torch._dynamo hybrid.training.build hybrid.cli.app hybrid.folder.board"
_FORKING.set_forkserver_preload(_SLOW.split())


class Job:
    """One `hybrid train`, its output in files beside `log`.

    Under mpirun or torchrun on `ranks` ranks; else in one process, forked from a server that has
    imported Python's packages already, or `fresh`.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        ranks: int,
        launcher: str,
        fault: Mapping[str, Any] | None = None,
        fresh: bool = False,
    ) -> None:
        self.launcher, self._out, self._err = launcher, log.with_suffix(".out"), log
        self._size, self._mark = ranks, f"{os.getpid()}-{next(_NUMBERS)}"
        self._seen: dict[int, str] = {}
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        given = {"HYBRID_FAULT": json.dumps(fault or {}), "PYTHONPATH": path, "CI": "1"}
        environment = for_mpirun() | given | {job_processes.VARIABLE: self._mark}
        if launcher == "threads" and not fresh:
            self._process: Any = _FORKING.Process(
                target=_main, args=(list(words), str(self._out), str(self._err), environment)
            )
            self._process.start()
            self.pid = int(self._process.pid)
        else:
            command = ["-m", PROGRAM if fault else "hybrid", *words]
            path_to = Path(sys.executable).parent / launcher
            if launcher == "torchrun":
                started = [str(path_to), "--standalone", f"--nproc-per-node={ranks}"]
            elif launcher == "mpirun":
                started = [str(path_to), "-n", str(ranks), sys.executable]
            else:
                started = [sys.executable]
            # a shell's background job ignores Ctrl-C, and so would all that it starts
            command = ["env", "--default-signal=INT", *started, *command]
            with self._out.open("w") as out, self._err.open("w") as err:
                self._process = subprocess.Popen(
                    command, env=os.environ | environment, stdout=out, stderr=err
                )
            self.pid = self._process.pid

    def status(self) -> int | None:
        """The exit status; None while it runs, minus the signal's number if one ended it."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        self._process.join(0)
        return self._process.exitcode

    def ranks(self) -> list[int]:
        """The living ranks of a launcher; alone, the process itself."""
        if self.launcher == "threads":
            self._seen[self.pid] = _born(self.pid)
        else:
            for pid in _children(self.pid):
                self._seen.setdefault(pid, _born(pid))
        return [pid for pid, born in self._seen.items() if born and _born(pid) == born]

    def await_ranks(self, limit: float) -> None:
        """Wait until all ranks are there, or the job has ended."""
        end, size = monotonic() + limit, 1 if self.launcher == "threads" else self._size
        while len(self.ranks()) < size and monotonic() < end and self.status() is None:
            sleep(0.01)

    def await_listeners(self, limit: float) -> None:
        """Wait until all ranks catch SIGUSR1, as soon as Python runs, or the job has ended."""
        self.await_ranks(limit)
        end = monotonic() + limit
        while not all(map(_listens, self.ranks())) and monotonic() < end:
            sleep(0.01)

    def wait(self, limit: float) -> bool:
        """Wait for the end of launcher and ranks; False if some still run after `limit` seconds."""
        end = monotonic() + limit
        while monotonic() < end:
            if not self.ranks() and self.status() is not None:
                return True
            sleep(0.01)
        return False

    def left(self, limit: float) -> list[str]:
        """What the job has started and is there after so many seconds, whoever its parent is."""
        end = monotonic() + limit
        while (found := job_processes.living(self._mark)) and monotonic() < end:
            sleep(0.05)
        return [*found.values()]

    def kill(self) -> None:
        """End what is left of the job."""
        alone = [self.pid] if self.status() is None else []
        for pid in {*self.ranks(), *job_processes.living(self._mark), *alone}:
            send(pid, signal.SIGKILL)

    def output(self) -> str:
        """Its stderr."""
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    def said(self) -> str:
        """Its stderr without torchrun's own tracebacks."""
        return _OF_TORCHRUN.sub("", self.output())

    def rank_status(self) -> int | None:
        """The exit status of the rank that ended first with a failure, which mpirun gives, too.

        torchrun's own is 1, whatever its ranks' are.
        """
        status, failures = self.status(), _ROOT_CAUSE.search(self.output())
        return int(failures[1]) if failures and status == 1 else status


def send(pid: int, number: int) -> None:
    """Signal a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _main(words: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["hybrid", *words]
    from tests.faults.program import main

    main()


def _born(pid: int) -> str:
    """When the process began, empty if it has ended: tells a pid from its next owner."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    return [each for child in _children(pid) for each in (child, *descendants(child))]


def _listens(pid: int) -> bool:
    """Whether a process catches SIGUSR1; one that has ended is waited for no longer."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
