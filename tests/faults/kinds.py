"""What can go wrong with processes and data. Each kind decides by its seed where and when.

A kind acts in three turns: it prepares a run and yields what to arm inside the program; it gets the
job and strikes while that goes on; it mends what must be mended before the run can be resumed.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

from tests.faults.processes import Job, send
from tests.faults.training import SAMPLES, References, Training

PATIENCE = 60.0
"""Seconds a run may take to get to where it is struck, or to its end, on a quiet machine."""
ANY = range(-64, 256)
FAILED = tuple(status for status in ANY if status)
ON_RANKS = ("mpirun", "torchrun")
"""Launchers whose ranks are processes."""
MOMENTS = ("start", "train", "write")


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
    words: list[str] = field(default_factory=list)
    """Further words of the command."""
    resumed_with: list[str] = field(default_factory=list)
    """Further words of the resume."""
    sent: set[signal.Signals] = field(default_factory=set)
    """Signals that have struck it."""
    missed: bool = False
    """Whether the run had ended before its moment came."""
    damaged: set[str] = field(default_factory=set)
    """Checkpoints that the fault itself has taken."""
    clean: ExitStack = field(default_factory=ExitStack)
    """What is undone once all is over."""

    def now(self, detail: str) -> None:
        """The fault happens at this moment."""
        self.struck, self.detail = monotonic(), " ".join(detail.split())

    def stopped(self, checkpoints: int = 0) -> list[Path]:
        """Begin with a run that has ended after so many checkpoints, or one or two."""
        number = checkpoints or self.random.randrange(1, 3)
        return self.references.stopped(self.training, self.out, number)


Acts = Generator[dict[str, Any], Job, None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and what a run that meets it may do."""

    name: str
    acts: Callable[[Scene], Acts]
    statuses: Collection[int] = FAILED
    launchers: tuple[str, ...] = ("threads", *ON_RANKS)
    requests: tuple[signal.Signals, ...] = ()
    """Signals that ask a run to stop; they end Python itself while it starts."""
    timed: bool = True
    """Whether the run must end soon after it, being struck at a known moment."""
    silent: bool = False
    """Whether nobody is left to say a word."""
    resumes: bool = False
    """Whether the run that is struck is itself a resumed one."""
    workers: int = 0
    """Processes that make each rank's mini-batches."""
    mounts: bool = False
    """Whether it mounts a file system."""


def moment(scene: Scene, job: Job, among: tuple[str, ...] = MOMENTS) -> str:
    """Wait for a moment of the run, by the seed; gives its name."""
    which = scene.random.choice(among)
    checkpoints = scene.out / "checkpoints"
    end = monotonic() + 5 * PATIENCE

    def until(reached: Callable[[], bool], pause: float) -> None:
        while not reached() and job.status() is None and monotonic() < end:
            sleep(pause)

    job.await_ranks(PATIENCE)
    if which == "start":
        sleep(scene.random.uniform(0, 2 if job.launcher == "threads" else 4))
    elif which == "train":
        lines = len(scene.references.result(scene.training)["metrics"])
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


def signals(
    *numbers: signal.Signals, to: str, among: tuple[str, ...] = MOMENTS, times: int = 1
) -> Callable[[Scene], Acts]:
    """One of these signals, to a rank, to the launcher, to either or to all."""

    def acts(scene: Scene) -> Acts:
        job = yield {}
        when, number, ranks = moment(scene, job, among), scene.random.choice(numbers), job.ranks()
        one = scene.random.choice(ranks or [job.pid])
        either = scene.random.choice([job.pid, one])
        pids = {"rank": [one], "launcher": [job.pid], "either": [either]}.get(to, [*ranks, job.pid])
        whom = f"rank {ranks.index(pids[0])}" if pids[0] in ranks else job.launcher
        scene.now(f"{number.name} to {'all' if to == 'all' else whom} {when}")
        scene.sent.add(number)
        for turn in range(times):
            if turn:
                sleep(scene.random.uniform(0.05, 0.3))
            for pid in pids:
                send(pid, number)

    return acts


def slow_rank(scene: Scene) -> Acts:
    job = yield {}
    when, ranks = moment(scene, job), job.ranks()
    if not ranks:
        return
    which, seconds = scene.random.randrange(len(ranks)), scene.random.uniform(0.3, 4)
    send(ranks[which], signal.SIGSTOP)
    sleep(seconds)
    send(ranks[which], signal.SIGCONT)
    scene.now(f"rank {which} for {seconds:.1f} s {when}")


def late_rank(scene: Scene) -> Acts:
    rank = scene.random.randrange(scene.training.ranks)
    seconds = scene.random.uniform(0.5, 5)
    scene.now(f"rank {rank} by {seconds:.1f} s")
    yield {"kind": "late", "rank": rank, "seconds": seconds}


def stopped_rank(scene: Scene) -> Acts:
    """A rank stands still for ever, and the others wait `links.timeout` seconds for it."""
    scene.words += ["--set", "links.timeout=3"]
    job = yield {}
    ranks = training_ranks(scene, job)
    if ranks:
        which = scene.random.randrange(len(ranks))
        send(ranks[which], signal.SIGSTOP)
        scene.now(f"rank {which}")
        sleep(0.05)
        scene.missed = (scene.out / "summary.json").exists()
        if scene.missed:  # it was stopped when the training was over
            send(ranks[which], signal.SIGCONT)


def training_ranks(scene: Scene, job: Job) -> list[int]:
    """The ranks, as soon as they train: such a run is over in a second."""
    end = monotonic() + PATIENCE
    while not lines_of(scene.out) and job.status() is None and monotonic() < end:
        sleep(0.002)
    scene.missed = job.status() is not None
    return [] if scene.missed else job.ranks()


def other_items(scene: Scene) -> Acts:
    """The data of one rank are a stale copy, in which each item has moved by one."""
    rank = scene.random.randrange(1, scene.training.ranks)
    scene.now(f"on rank {rank}")
    yield {"kind": "other items", "rank": rank}


def hanging_item(scene: Scene) -> Acts:
    """An item never comes, in a worker of a rank that reads items."""
    rank = scene.random.choice((0, scene.training.ranks - 1))
    rank = 0 if scene.training.launcher == "threads" else rank
    item = scene.random.randrange(SAMPLES)
    scene.now(f"item {item} on rank {rank}")
    yield {"kind": "hanging item", "rank": rank, "item": item}


def poison(scene: Scene) -> Acts:
    """Weights that are no numbers: fails with a word, or rolls back and ends well.

    Of one replica alone, where there are several.
    """
    rank, call = scene.random.randrange(scene.training.ranks), scene.random.randrange(1, 5)
    if scene.training.way == "kept windows":
        call = min(call, 3)
    scene.now(f"of rank {rank}, call {call}")
    yield {"kind": "poison", "rank": rank, "call": call}


def rollbacks(out: Path) -> int:
    """How often a run that has ended went back to a checkpoint by itself."""
    try:
        return len(json.loads((out / "summary.json").read_text())["rollbacks"])
    except (OSError, ValueError):
        return 0


_KILL, _TERM, _ABORT = signal.SIGKILL, signal.SIGTERM, signal.SIGABRT
_USER = (signal.SIGUSR1, signal.SIGUSR2)
_THREADS = ("threads",)
KINDS = (
    Fault("kill -9 of a rank", signals(_KILL, to="rank"), launchers=ON_RANKS),
    Fault(
        "kill -9 of the launcher", signals(_KILL, to="launcher"), launchers=ON_RANKS, silent=True
    ),
    Fault("kill -9 of all", signals(_KILL, to="all"), silent=True),
    Fault("data workers", signals(_KILL, _ABORT, to="either"), silent=True, workers=2),
    Fault("USR1, USR2", signals(*_USER, to="either"), (0, 75), requests=_USER),
    # to mpirun it ends the ranks half a second later; to a rank, or alone, it is a request
    Fault("TERM", signals(_TERM, to="either"), ANY, requests=(_TERM,)),
    Fault("TERM twice", signals(_TERM, to="launcher", times=2), (0, 75, -_TERM), _THREADS),
    # while Python itself starts, Ctrl-C is Python's to answer
    Fault("Ctrl-C", signals(signal.SIGINT, to="launcher", among=("train", "write"))),
    Fault("a rank stands still", slow_rank, (0,), ON_RANKS, timed=False),
    Fault("a rank stands still for ever", stopped_rank, launchers=ON_RANKS),
    Fault("a rank starts late", late_rank, (0,), ON_RANKS, timed=False),
    Fault("NaN in the weights", poison, ANY, timed=False),
    Fault("a rank has other data", other_items, launchers=ON_RANKS, timed=False, workers=1),
    Fault("an item never comes", hanging_item, timed=False, workers=1),
)
