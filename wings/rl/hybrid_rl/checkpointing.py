"""What a checkpoint keeps of a run: the tensors of its parts, and how far it has come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from hybrid.errors import one_line
from hybrid.folder import checkpoint
from hybrid.folder.manifest import Count, ManifestPart, check
from hybrid_rl.course import Course
from hybrid_rl.parts import Tensors
from hybrid_rl.settings import RlSettings

Files = dict[str, Tensors]
SAME = ("env", "seed", "actors", "lag", "random_steps")
"""Settings that a resumed run must have too, though its tensors do not show them."""


class Progress(ManifestPart):
    """What the manifest has beside the files."""

    env: str
    seed: Count
    actors: Count
    lag: Count
    random_steps: Count
    rounds: Count
    """Steps of each actor."""
    returns: list[float]
    """Of the newest evaluation."""
    seconds: Annotated[float, Field(ge=0)]
    """Of steps and updates together, by the slowest rank, after the random steps."""


def collect(course: Course) -> tuple[Files, Files]:
    """The tensors of this rank's networks, and of what its parts keep besides."""
    owners = [part for part in (course.front, course.middle) if part is not None]
    made = [found for part in owners if (found := part.unit()) is not None]
    units = {unit.name: checkpoint.tensors_of(unit, optimizers) for unit, optimizers in made}
    states = {} if course.front is None else {"replay": course.front.replay.state()}
    return units, states | {f"actor {actor.number}": actor.tensors() for actor in course.actors}


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
        if part is not None and (found := part.unit()) is not None:
            unit, optimizers = found
            checkpoint.restore(folder, manifest, [unit], optimizers)
    try:
        if course.front is not None:
            course.front.replay.load_state(checkpoint.load_state(folder, manifest, "replay"))
        for actor in course.actors:
            tensors = checkpoint.load_state(folder, manifest, f"actor {actor.number}")
            actor.restore(tensors, progress.rounds)
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{folder} cannot be resumed with these settings ({type(error).__name__}: "
            f"{one_line(error)}): resume with the settings it was made with"
        ) from error
    return progress
