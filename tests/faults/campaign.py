"""One fault after another: strike, look at what is left, resume, compare."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from time import monotonic

from tests.faults import kinds, storage
from tests.faults.kinds import PATIENCE, Fault, Scene
from tests.faults.processes import Job
from tests.faults.training import GRIDS, WAYS, References, Training, result, whole

LIMIT = 10.0
"""Seconds from a fault to the end of every process, on a machine that has its cores to itself."""
KINDS: tuple[Fault, ...] = (*kinds.KINDS, *storage.KINDS)
CRASHES = [sign for n in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) for sign in (-n, 128 + n)]
_LAUNCHER_SAYS = re.compile(
    r"noticed that process rank|one or more processes exited with non-zero|MPI_ABORT was invoked"
    r"|Root Cause \(first observed failure\)|Received \d+ death signal"
)
_REMEDY = re.compile(r"remove (\S+) to resume from|if (\S+) is another run's, remove it")
_ANEW = ("no checkpoint to resume from", "start again in a new folder")


@dataclass
class Outcome:
    """What came of one fault."""

    seed: int
    kind: str
    launcher: str
    ranks: int
    way: str
    detail: str = ""
    status: int | None = None
    seconds: float | None = None
    """From the fault to the end of every process, where the run was struck at a known moment."""
    said: list[str] = field(default_factory=list)
    resumes: int = 0
    problems: list[str] = field(default_factory=list)
    """late, hang, orphan, traceback, reason, status, lost, mixed, bits: each with a word on it."""
    load: float = 0.0
    """Processes that wanted a core in the last minute, over the cores: above 1 they waited."""
    replicas: int = 1
    sync: str = ""
    """How they are kept together, where there are several."""

    @property
    def how(self) -> str:
        """By which way they train, and agree."""
        return f"{self.way}, {self.sync}" if self.sync else self.way


def outcomes(
    runs: int,
    seed: int,
    root: Path,
    only: str = "",
    launcher: str = "",
    replicas: int = 1,
    apart: bool = False,
    way: str = "",
) -> Iterator[Outcome]:
    """Strike `runs` times; the kinds take turns, the rest is up to the seed.

    `only` kinds with this word in their names, and those that the launcher may meet; ranks that are
    `apart` have a disk each.
    """
    references = References(root)
    chosen = [k for k in KINDS if only in k.name and launcher in ("", *k.launchers)]
    chosen = [k for k in chosen if storage.can_mount() or not k.mounts]
    if apart:
        chosen = [k for k in chosen if not k.mounts and {*k.launchers} & {*kinds.ON_RANKS}]
    for number in range(seed, seed + runs):
        folder = root / f"fault-{number}"
        folder.mkdir()
        fault = chosen[number % len(chosen)]
        yield one(number, fault, folder, references, launcher, replicas, apart, way)
        shutil.rmtree(folder, ignore_errors=True)


def one(
    seed: int,
    fault: Fault,
    folder: Path,
    references: References,
    launcher: str = "",
    replicas: int = 1,
    apart: bool = False,
    way: str = "",
) -> Outcome:
    """Strike one run, by this launcher or any, and bring it to its end.

    Replicas have two blocks each, and ranks of their own where the fault may meet ranks. A `way` of
    training that is named is not drawn.
    """
    random = Random(seed)
    if way:
        launcher = launcher or random.choice(fault.launchers)
        units = {"replicas": 2, "sync": "all-reduce"} if way == "units" else {}
        training = Training(way, launcher, 2, **units)
    elif replicas > 1:
        of_ranks = [name for name in fault.launchers if name in kinds.ON_RANKS]
        launcher = launcher or random.choice(of_ranks or fault.launchers)
        way, sync = random.choice(GRIDS)
        training = Training(way, launcher, 2 * replicas, replicas=replicas, sync=sync)
    else:
        ways = [name for name in fault.launchers if name in kinds.ON_RANKS or not apart]
        launcher = launcher or random.choice(ways)
        ranks = 2 if launcher == "threads" else random.choice((2, 2, 2, 3))
        training = Training(random.choice(list(WAYS)), launcher, ranks)
    training = replace(training, workers=fault.workers, apart=apart)
    outcome = Outcome(seed, fault.name, launcher, training.ranks, training.way)
    outcome.replicas, outcome.sync = training.replicas, training.sync
    references.result(training)
    scene = Scene(random, training, folder / "run", references)
    scene.resumed_with += training.repeated
    with scene.clean:
        _struck(fault, scene, outcome, folder / "struck.err")
        outcome.problems += _resumed(fault, scene, outcome, folder)
    return outcome


def _struck(fault: Fault, scene: Scene, outcome: Outcome, log: Path) -> None:
    """The run that the fault hits: how it ends, and what it leaves."""
    acts = fault.acts(scene)
    armed, words = next(acts), [*scene.training.words(scene.out), *scene.words]
    if fault.resumes:
        words = ["train", "--resume", "--out", str(scene.out), *scene.resumed_with]
    fresh = scene.random.random() < 0.25
    before = whole(scene.out)
    armed |= _disks(scene)
    job = Job(words, log, scene.training.ranks, scene.training.launcher, armed, fresh)
    with suppress(StopIteration):
        acts.send(job)
    before |= whole(scene.out)
    outcome.load = round(load(), 2)
    ended = job.wait(PATIENCE * max(1.0, outcome.load))
    waited = monotonic() - scene.struck
    if fault.timed:
        outcome.seconds = round(waited, 2)
        if outcome.seconds > LIMIT:
            outcome.problems.append(f"late: {outcome.seconds} s, at {outcome.load} times the cores")
    outcome.detail, outcome.status = scene.detail, job.status()
    if outcome.status is None:
        where = f"after {kinds.lines_of(scene.out)} lines of metrics"
        outcome.problems.append(f"hang: {waited:.0f} s after the fault not ended, {where}")
    elif not ended:
        outcome.problems.append("orphan: ranks outlive their launcher")
    elif left := job.left(LIMIT):
        outcome.problems.append(f"orphan: {len(left)} processes outlive the job: {left[0][:80]}")
    job.kill()
    job.wait(LIMIT)
    next(acts, None)
    text = job.said()
    outcome.said = reasons(text)
    if not (scene.missed and outcome.status == 0):
        outcome.problems += _words(scene, fault, text, outcome, job.rank_status())
    after = whole(scene.out)
    lost = [s for s in before if after.get(s) != before[s] and s not in scene.damaged]
    if lost:
        outcome.problems.append(f"lost: checkpoint {', '.join(lost)}")


def _disks(scene: Scene) -> dict[str, str]:
    """What arms ranks that have a disk each."""
    return {"disk": str(scene.out.parent)} if scene.training.apart else {}


def load() -> float:
    """Processes that wanted a core in the last minute, over the cores there are."""
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))


def reasons(text: str) -> list[str]:
    """The lines with which the command says why it ended."""
    return [line for line in text.splitlines() if line.startswith("hybrid: ")]


def _words(
    scene: Scene, fault: Fault, text: str, outcome: Outcome, status: int | None
) -> Iterator[str]:
    """What is wrong with how it ended, a rank's status being `status`."""
    sent = [sign for number in scene.sent for sign in (-number, 128 + number)]
    ended_by = {-status, status - 128} if status is not None else set()
    if "(start)" in outcome.detail and ended_by & set(fault.requests):
        return
    if "Traceback" in text or re.search(r"^\S*Error: ", text, re.MULTILINE):
        yield f"traceback: {text.strip().splitlines()[-1][:200]}"
    if len(outcome.said) > 1:
        yield f"reason: said {len(outcome.said)} times"
    if status != 0 and not (fault.silent or outcome.said or _LAUNCHER_SAYS.search(text)):
        yield f"reason: none, with status {status}"
    if status in CRASHES and status not in sent:
        yield f"status: {status}, a crash of its own"
    if status is not None and status not in fault.statuses:
        yield f"status: {status}: {text.strip()[-200:]}"


def _resumed(fault: Fault, scene: Scene, outcome: Outcome, folder: Path) -> Iterator[str]:
    """Resume until the run has ended, doing what its one line says, and compare."""
    out, status = scene.out, outcome.status
    apart = scene.training.apart
    by_ranks = apart or scene.random.random() < 0.25
    launcher = scene.training.launcher if by_ranks else "threads"
    copies = whole(out.parent / "disk-1" / out.name)
    if apart and status != 0 and copies and scene.random.random() < 0.5:
        shutil.rmtree(out, ignore_errors=True)
        outcome.detail += "; the first disk is lost"
    while status != 0:
        outcome.resumes += 1
        if outcome.resumes > 4:
            yield f"bits: not ended after {outcome.resumes - 1} resumes"
            return
        words = ["train", "--resume", "--out", str(out), *scene.resumed_with]
        if out != scene.out:
            words = replace(scene.training, launcher=launcher).words(out)
        log = folder / f"resume-{outcome.resumes}.err"
        job = Job(words, log, scene.training.ranks, launcher, _disks(scene))
        if not job.wait(PATIENCE * max(1.0, load())):
            job.kill()
            yield "hang: a resumed run does not end"
            return
        status, text = job.status(), job.said()
        if status == 0:
            break
        said = reasons(text)
        if len(said) != 1 or "Traceback" in text:
            yield f"reason: a resume that fails says {said or text[-200:]!r}"
            return
        kept = set(whole(scene.out)) - scene.damaged
        if remedy := _REMEDY.search(said[0]):
            shutil.rmtree(remedy[1] or remedy[2])
        elif any(words in said[0] for words in _ANEW) and not kept:
            out = folder / "anew"
        else:
            yield f"bits: cannot be resumed: {said[0]}"
            return
    if "NaN" not in fault.name or not kinds.rollbacks(out):
        yield from _compared(scene, out)


def _compared(scene: Scene, out: Path) -> Iterator[str]:
    try:
        mine, wanted = result(out), scene.references.result(scene.training)
    except (OSError, ValueError, KeyError, IndexError) as error:
        yield f"bits: the result cannot be read: {error}"
        return
    for what in ("units", "test accuracy", "metrics"):
        if mine[what] != wanted[what]:
            both = zip(mine[what], wanted[what], strict=False)
            other = [f"{left} {right}" for left, right in both if left != right]
            yield f"bits: other {what}: {', '.join(other)[:200] or 'their number'}"
            return
