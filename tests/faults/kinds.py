"""What can go wrong from outside: signals, delays, clocks. Each decides by its seed where and when.

A kind prepares a run, strikes once while it goes on, and mends what must be mended before the run
can be resumed.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

from tests.faults.processes import Job, send
from tests.faults.training import LR, References, Training

PATIENCE = 60.0
"""Seconds a run may take to get to where it is struck, or to its end, on a quiet machine."""


@dataclass
class Scene:
    """One run and its fault."""

    random: Random
    training: Training
    out: Path
    references: References
    detail: str = ""
    struck: float = field(default_factory=monotonic)
    """When the fault happened; before that the job is only starting."""
    resumed_with: list[str] = field(default_factory=list)
    """Further words of the resume."""
    missed: bool = False
    """Whether the run had ended before its moment came."""

    def now(self, detail: str) -> None:
        """The fault happens at this moment."""
        self.struck, self.detail = monotonic(), " ".join(f"{self.detail} {detail}".split())


class Fault:
    """The base: nothing happens."""

    name = "none"
    launchers: tuple[str, ...] = ("threads", "mpirun")
    statuses: Callable[[int], bool] = staticmethod(lambda status: status != 0)
    survived = False
    """Whether the run must go on to its end."""
    silent = False
    """Whether nobody is left to say a word."""
    resumes = False
    """Whether the run that is struck is itself a resumed one."""
    waits = False
    """Whether the fault is there from the start, and the run meets it when it gets to it."""

    same_metrics = True
    """Whether metrics.jsonl must be that of an undisturbed run in the end."""

    def prepare(self, scene: Scene) -> dict[str, Any] | None:
        """Before the start; gives a fault to arm inside the program."""
        return None

    def strike(self, scene: Scene, job: Job) -> None:
        """Once it runs."""

    def mend(self, scene: Scene) -> None:
        """After its end, before it is resumed."""

    def clean(self, scene: Scene) -> None:
        """Once all is over."""

    def damaged(self, scene: Scene) -> set[str]:
        """Checkpoints that the fault itself has taken."""
        return set()


def moment(scene: Scene, job: Job, among: tuple[str, ...] = ("start", "train", "write")) -> str:
    """Wait for a moment of the run, by the seed; gives its name."""
    which = scene.random.choice(among)
    checkpoints = scene.out / "checkpoints"
    end = monotonic() + 5 * PATIENCE

    def until(reached: Callable[[], bool], pause: float) -> None:
        while not reached() and job.status() is None and monotonic() < end:
            sleep(pause)

    job.await_ranks(PATIENCE)
    if which == "start":
        sleep(scene.random.uniform(0, 4 if job.launcher == "mpirun" else 2))
    elif which == "train":
        lines = len(scene.references.result(scene.training).metrics)
        wanted = scene.random.randrange(1, lines - 1)
        until(lambda: lines_of(scene.out) >= wanted, 0.01)
        sleep(scene.random.uniform(0, 0.3))
    else:
        before = scene.random.randrange(2)
        until(lambda: len(list(checkpoints.glob("[0-9]*"))) >= before, 0.005)
        until(lambda: any(checkpoints.glob(".*")), 0.0005)
        sleep(scene.random.uniform(0, 0.03))
    scene.missed = job.status() is not None
    return f"({which}: ended before)" if scene.missed else f"({which})"


def lines_of(out: Path) -> int:
    """Lines of metrics so far."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


class KillRank(Fault):
    name = "kill -9 of a rank"
    launchers = ("mpirun",)

    def strike(self, scene: Scene, job: Job) -> None:
        when = moment(scene, job)
        ranks = job.ranks()
        if ranks:
            which = scene.random.randrange(len(ranks))
            scene.now(f"rank {which} {when}")
            send(ranks[which], signal.SIGKILL)


class KillLauncher(Fault):
    name = "kill -9 of mpirun"
    launchers = ("mpirun",)
    silent = True

    def strike(self, scene: Scene, job: Job) -> None:
        when = moment(scene, job)
        job.ranks()
        scene.now(when)
        send(job.pid, signal.SIGKILL)


class KillAll(Fault):
    name = "kill -9 of all"
    silent = True

    def strike(self, scene: Scene, job: Job) -> None:
        when = moment(scene, job)
        everyone = [*job.ranks(), job.pid]
        scene.now(when)
        for pid in everyone:
            send(pid, signal.SIGKILL)


class StopSignal(Fault):
    """A request to stop, to the launcher or to one rank."""

    name = "USR1, USR2"
    numbers: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGUSR2)
    statuses = staticmethod(lambda status: status in (0, 75))

    def before_python_listens(self, status: int | None) -> bool:
        """Whether the signal ended the process, as it does while Python itself starts."""
        return status is not None and {-status, status - 128} & set(self.numbers) != set()

    def strike(self, scene: Scene, job: Job) -> None:
        when = moment(scene, job)
        number = scene.random.choice(self.numbers)
        ranks = job.ranks()
        if not ranks:
            return
        pid = scene.random.choice([job.pid, scene.random.choice(ranks)])
        whom = "mpirun" if pid == job.pid and job.launcher == "mpirun" else "a rank"
        scene.now(f"{number.name} to {whom} {when}")
        send(pid, number)


class Terminate(StopSignal):
    """To mpirun it ends the ranks half a second later; to a rank, or alone, it is a request."""

    name = "TERM"
    numbers = (signal.SIGTERM,)
    statuses = staticmethod(lambda status: True)


class TerminateTwice(Fault):
    name = "TERM twice"
    launchers = ("threads",)
    statuses = staticmethod(lambda status: status in (0, 75, -signal.SIGTERM))

    def strike(self, scene: Scene, job: Job) -> None:
        when = moment(scene, job)
        scene.now(when)
        send(job.pid, signal.SIGTERM)
        sleep(scene.random.uniform(0.05, 0.3))
        send(job.pid, signal.SIGTERM)


class Interrupt(Fault):
    name = "Ctrl-C"

    def strike(self, scene: Scene, job: Job) -> None:
        # while Python itself starts, Ctrl-C is Python's to answer
        when = moment(scene, job, ("train", "write"))
        scene.now(when)
        send(job.pid, signal.SIGINT)


class SlowRank(Fault):
    name = "a rank stands still"
    launchers = ("mpirun",)
    statuses = staticmethod(lambda status: status == 0)
    survived = True

    def strike(self, scene: Scene, job: Job) -> None:
        when = moment(scene, job)
        ranks = job.ranks()
        if not ranks:
            return
        which, seconds = scene.random.randrange(len(ranks)), scene.random.uniform(0.3, 4)
        send(ranks[which], signal.SIGSTOP)
        sleep(seconds)
        send(ranks[which], signal.SIGCONT)
        scene.now(f"rank {which} for {seconds:.1f} s {when}")


class LateRank(Fault):
    name = "a rank starts late"
    launchers = ("mpirun",)
    statuses = staticmethod(lambda status: status == 0)
    survived = True

    def prepare(self, scene: Scene) -> dict[str, Any]:
        rank = scene.random.randrange(scene.training.ranks)
        seconds = scene.random.uniform(0.5, 5)
        scene.now(f"rank {rank} by {seconds:.1f} s")
        return {"kind": "late", "rank": rank, "seconds": seconds}


class ClockJump(Fault):
    name = "the clock jumps"
    statuses = staticmethod(lambda status: status == 0)
    survived = True

    def prepare(self, scene: Scene) -> dict[str, Any]:
        ranks = scene.training.ranks if scene.training.launcher == "mpirun" else 1
        rank = scene.random.choice([None, *range(ranks)])
        by = scene.random.choice([-1, 1]) * 10 ** scene.random.uniform(0, 8)
        after = scene.random.uniform(0, 8 if ranks > 1 else 3)
        scene.now(f"by {by:.0f} s")
        return {"kind": "clock", "rank": rank, "after": after, "by": by}


class Poison(Fault):
    """Weights that are no numbers: fails with a word, or rolls back and ends well."""

    name = "NaN in the weights"
    waits = True
    statuses = staticmethod(lambda status: True)

    def prepare(self, scene: Scene) -> dict[str, Any]:
        rank, call = scene.random.randrange(scene.training.ranks), scene.random.randrange(1, 5)
        if scene.training.way == "kept windows":
            call = min(call, 3)
        scene.now(f"of block {rank}, call {call}")
        return {"kind": "poison", "rank": rank, "call": call}


class AbsurdRate(Fault):
    """A run is resumed with a learning rate that makes the loss infinite."""

    name = "NaN by the learning rate"
    waits = True
    statuses = staticmethod(lambda status: True)
    resumes = True

    def prepare(self, scene: Scene) -> None:
        scene.references.stopped(scene.training, scene.out, scene.random.randrange(1, 3))
        scene.resumed_with = ["--lr", f"{10 ** scene.random.uniform(9, 15):.3g}"]
        scene.now(" ".join(scene.resumed_with))

    def mend(self, scene: Scene) -> None:
        scene.resumed_with = ["--lr", LR]


def rollbacks(out: Path) -> int:
    """How often a run that has ended went back to a checkpoint by itself."""
    try:
        return len(json.loads((out / "summary.json").read_text())["rollbacks"])
    except (OSError, ValueError):
        return 0
