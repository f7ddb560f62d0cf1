"""What others do to a run: a second run on its folder, lost streams and events, stopped ranks."""

from __future__ import annotations

import signal
from dataclasses import replace
from time import monotonic, sleep

from tests.faults.kinds import ON_RANKS, PATIENCE, Acts, Fault, Scene, lines_of, moment
from tests.faults.processes import Job, send
from tests.faults.training import SAMPLES

_IN_USE = "is in use by the run of"
_ENDS = ("stays as it is", _IN_USE, "already holds a run", "no checkpoint to resume from")


def second_run(scene: Scene) -> Acts:
    """Another run on the folder: resumed, resumed with another learning rate, or a new one."""
    job = yield {}
    when = moment(scene, job, ("train", "write"))
    which = scene.random.choice(("--resume", "--resume --lr 0.3", "--auto-resume", "new"))
    words = ["train", *which.split(), "--out", str(scene.out)]
    if which == "new":
        words = replace(scene.training, launcher="threads").words(scene.out)
    scene.now(f"{which} {when}")
    other = Job(words, scene.out.with_suffix(".second"), 2, "threads")
    if not other.wait(PATIENCE):
        scene.broken.append("hang: the second run does not end")
        other.kill()
    said = other.output().strip()
    if other.status() == 0:
        # a run that has ended gives its folder back before its processes are gone
        if job.status() is None and "stays as it is" not in other.printed():
            scene.broken.append(f"mixed: the second run went on beside the first: {said}")
    elif not any(words in said for words in _ENDS) or "\n" in said or "Traceback" in said:
        scene.broken.append(f"reason: the second run says {said[-200:]!r}")
    elif _IN_USE not in said and not (scene.missed or (scene.out / "summary.json").exists()):
        scene.broken.append(f"reason: the first run lives, but the second says {said!r}")


def streams_lost(scene: Scene) -> Acts:
    """Nobody reads the output, or its disk is full; half of the runs are then asked to stop."""
    which = scene.random.choice(("pipe", "full"))
    asked = scene.random.random() < 0.5
    job = yield {"kind": "streams", "which": which}
    when = moment(scene, job, ("train",))
    scene.now(f"{which}{', then USR1' if asked else ''} {when}")
    if asked:
        send(job.pid, signal.SIGUSR1)


def stopped_rank(scene: Scene) -> Acts:
    """A rank stands still for ever, and the others wait `links.timeout` seconds for it."""
    scene.words += ["--set", "links.timeout=3"]
    job = yield {}
    ranks = _training(scene, job)
    if ranks:
        which = scene.random.randrange(len(ranks))
        send(ranks[which], signal.SIGSTOP)
        scene.now(f"rank {which}")
        sleep(0.05)
        scene.missed = (scene.out / "summary.json").exists()
        if scene.missed:  # it was stopped when the training was over
            send(ranks[which], signal.SIGCONT)


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


def _training(scene: Scene, job: Job) -> list[int]:
    """The ranks, as soon as they train: such a run is over in a second."""
    end = monotonic() + PATIENCE
    while not lines_of(scene.out) and job.status() is None and monotonic() < end:
        sleep(0.002)
    scene.missed = job.status() is not None
    return [] if scene.missed else job.ranks()


KINDS = (
    Fault("two runs on one folder", second_run, (0,), timed=False),
    Fault("streams lost", streams_lost, (0, 75), ("threads",), timed=False, silent=True),
    Fault("a rank stands still for ever", stopped_rank, launchers=ON_RANKS),
    Fault("a rank has other data", other_items, launchers=ON_RANKS, timed=False, workers=1),
    Fault("an item never comes", hanging_item, timed=False, workers=1),
)
