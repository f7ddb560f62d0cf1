"""[model] and [data]: what is trained, on what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybrid.settings.limits import MANY
from hybrid.settings.sections.base import Section, is_reference
from hybrid.solvers.acting import Acts, Needs

WorkerKind = Literal["thread", "forkserver"]

OWN_MODEL = Acts(
    "model.name is a network of this package", lambda run: not is_reference(run.model.name)
)
OWN_DATA = Acts("data.name is a data set of this package", lambda run: not run.own_data)
READS = Acts(
    "data.name is your own function, since this package's data are in memory",
    lambda run: run.own_data,
)
AUGMENTS = Needs(
    "lam is not carried without corrections, which trains on plain images (rounds.window is not "
    "all, or rounds.correct_every not 0)",
    lambda run: not run.setup.carried or run.setup.corrects or not run.solver.records,
)


class ModelSettings(Section):
    """[model] the network."""

    name: str = "resnet8"
    """resnet20 (6n+2), wrn-16-4, revnet20, resnet18; your own: module:function."""
    survival: Annotated[float, OWN_MODEL] = Field(default=1.0, gt=0, le=1)
    """Probability that a pass in training takes the last residual unit (stochastic depth)."""


class DataSettings(Section):
    """[data] the images."""

    name: str = "digits"
    """digits, cifar10, cifar100, synthetic; your own: module:function."""
    dir: Annotated[str, OWN_DATA] = ""
    """Folder of the data files; empty: $HYBRID_DATA, else ~/.cache/hybrid."""
    limit: Annotated[int, OWN_DATA] = Field(default=0, ge=0, le=MANY)
    """Train on the first so many images; 0: all."""
    augment: Annotated[bool, OWN_DATA] = True
    """Augment as usual for the data set (CIFAR: crop after padding by 4, flip; others: nothing)."""
    workers: Annotated[int, READS] = Field(default=0, ge=0, le=1024)
    """Threads or processes that read samples of your own data ahead; 0: none."""
    worker_kind: Annotated[WorkerKind, READS] = "thread"
    """thread, or forkserver: processes, for transforms that are slow in Python."""
    cutout: Annotated[int, OWN_DATA, AUGMENTS] = Field(default=0, ge=0, le=MANY)
    """Side of the square cut out of each training image, in pixels; 0: none."""
