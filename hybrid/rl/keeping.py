"""What a run keeps: the manifest's part, the parts' tensors, what was counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import Field
from torch import Tensor

from hybrid.errors import one_line
from hybrid.folder import checkpoint
from hybrid.folder.manifest import Count, Part, check
from hybrid.rl.course import Course
from hybrid.rl.settings import RlSettings

Seconds = Annotated[float, Field(ge=0)]
SAME = ("env", "seed", "actors", "lag", "random_steps")
"""Settings that a run keeps when it is resumed, which its tensors do not show."""


@dataclass
class Counted:
    """Of all training so far, by the slowest rank; random steps and pre-training apart."""

    steps: int = 0
    updates: int = 0
    seconds: float = 0.0
    waited: list[float] = field(default_factory=list)
    """Of each rank, of the seconds since these ranks began."""
    since: float = 0.0

    def add(self, steps: int, updates: int, seconds: float, waited: list[float]) -> None:
        """A stretch between two reports."""
        self.steps += steps
        self.updates += updates
        self.seconds += seconds
        self.since += seconds
        before = self.waited or [0.0] * len(waited)
        self.waited = [a + b for a, b in zip(before, waited, strict=True)]

    def idle(self) -> list[float]:
        """The share of its time that each rank has waited for others."""
        return [min(1.0, one / self.since) if self.since else 0.0 for one in self.waited]

    @classmethod
    def of(cls, progress: Progress, ranks: int) -> Counted:
        """What a checkpoint has counted; waiting only of as many ranks."""
        same = len(progress.waited) == ranks
        waited, since = (progress.waited, progress.since) if same else ([], 0.0)
        return cls(progress.steps, progress.updates, progress.seconds, waited, since)


class Progress(Part):
    """What the manifest tells of a run, beside the files."""

    env: str
    seed: Count
    actors: Count
    lag: Count
    random_steps: Count
    rounds: Count
    returns: list[float]
    steps: Count
    updates: Count
    seconds: Seconds
    waited: list[Seconds]
    since: Seconds

    @classmethod
    def of(cls, rl: RlSettings, rounds: int, returns: list[float], counted: Counted) -> Progress:
        """What there is to tell."""
        own = {key: getattr(rl, key) for key in SAME}
        return cls.model_validate({**own, "rounds": rounds, "returns": returns, **vars(counted)})


Files = dict[str, dict[str, Tensor]]


def collect(course: Course) -> tuple[Files, Files]:
    """The tensors of this rank's networks, and of what its parts keep besides."""
    owners = [part for part in (course.front, course.middle) if part is not None]
    made = [found for part in owners if (found := part.unit()) is not None]
    units = {unit.name: checkpoint.tensors_of(unit, optimizers) for unit, optimizers in made}
    states = {} if course.front is None else {"replay": course.front.replay.state()}
    return units, states | {f"actor {actor.number}": actor.kept() for actor in course.actors}


def restore(folder: Path, rl: RlSettings, course: Course) -> Progress:
    """Let this rank's parts go on from a checkpoint; ValueError if it is another run's."""
    manifest = checkpoint.read_manifest(folder)
    check(Progress, manifest, folder / "manifest.json")
    progress = Progress.model_validate({k: manifest[k] for k in Progress.model_fields})
    for key in SAME:
        if manifest[key] != getattr(rl, key):
            raise ValueError(
                f"{folder.parent.parent} is a run with rl.{key} {manifest[key]}, not "
                f"{getattr(rl, key)}: resume with its {key}, or choose another --out"
            )
    for part in (course.front, course.middle):
        found = None if part is None else part.unit()
        if found is not None:
            unit, optimizers = found
            checkpoint.restore(folder, manifest, [unit], optimizers)
    try:
        if course.front is not None:
            kept = checkpoint.load_state(folder, manifest, "replay")
            course.front.replay.load_state(kept)
        for actor in course.actors:
            kept = checkpoint.load_state(folder, manifest, f"actor {actor.number}")
            actor.restore(kept, progress.rounds)
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{folder} holds what this run cannot go on with ({type(error).__name__}: "
            f"{one_line(error)}): resume with the settings it was made with"
        ) from error
    return progress


def losses(course: Course) -> dict[str, float]:
    """The mean losses of this rank's parts since they were last asked for, by name."""
    found: dict[str, float] = {}
    if course.front is not None and course.front.losses:
        found["prediction"] = fmean(float(loss) for loss in course.front.losses)
        course.front.losses = []
    if course.middle is not None and course.middle.losses:
        names = course.middle.losses[0]._fields
        columns = zip(*course.middle.losses, strict=True)
        found |= {n: fmean(map(float, own)) for n, own in zip(names, columns, strict=True)}
        found["alpha"] = float(course.middle.learner.alpha)
        course.middle.losses = []
    return found
