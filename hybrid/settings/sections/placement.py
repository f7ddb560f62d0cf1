"""[split], [links] and [checkpoint]: what runs where, and what survives."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from hybrid.registries import AUTO, LINKS
from hybrid.settings.sections.base import (
    LARGE,
    MANY,
    TESTED,
    TRAIN_OR_BENCH,
    TRAIN_OR_PLAN,
    Section,
    is_reference,
)
from hybrid.solvers.acting import REPLICAS, Acts, Needs

BALANCED = Acts(
    "the command is train or bench, or a plan cuts a model of your own",
    lambda run: run.command != "plan" or is_reference(run.model.name),
)
KEEPS_UNITS = Needs(
    "every pass takes all units (model.survival is 1), or replicas would leave out different ones",
    lambda run: run.replicas == 1 or run.survival == 1,
    "take one replica",
)
ONE_DICTIONARY = Needs(
    "no cut has a factorization, which learns its dictionary from the samples of one replica",
    lambda run: run.replicas == 1 or not run.setup.factorized,
    "take one replica, or no factorization",
)


class SplitSettings(Section):
    """[split] units into blocks."""

    blocks: Annotated[int, TRAIN_OR_BENCH] = Field(default=0, ge=0, le=MANY)
    """Number of blocks; 0: the number of MPI ranks, or 2 without mpirun."""
    balance: Annotated[Literal["operations", "measured", "even"], BALANCED] = "operations"
    """What is balanced: counted operations (the same on every machine), measured time, units."""
    cuts: list[str] = Field(default=[])
    """The first unit of every block but the first; overrides balance."""
    replicas: Annotated[int, KEEPS_UNITS, ONE_DICTIONARY] = Field(default=0, ge=0, le=MANY)
    """Chains of the blocks, each on a share of a mini-batch; 0: MPI ranks over blocks, else 1."""
    side_by_side: Annotated[Literal["auto", "chain", "peers"], REPLICAS] = "auto"
    """MPI ranks that follow each other: a chain, peers, or (auto) those that send more."""


def _of_links(name: str, *kinds: str) -> Acts:
    """Where the links between the ranks read a setting, as these kinds do."""
    return Acts(
        f"links.kind is one that reads it, as {' and '.join(kinds)} do{'es' * (len(kinds) == 1)}",
        lambda run: name in run.link_settings,
    )


class LinkSettings(Section):
    """[links] how the blocks reach each other."""

    acts: ClassVar[dict[str, Acts]] = {"links.*": TRAIN_OR_PLAN}

    kind: str = LINKS.default
    """auto: MPI under mpirun, torch under torchrun, else threads; virtual: logical clocks."""
    device: Annotated[Literal["auto", "nccl", "host"], _of_links("device", "auto", "torch")] = (
        "auto"
    )
    """What carries tensors of a GPU between ranks of torch: nccl, host; auto: nccl, else host."""
    gigabits_per_second: Annotated[float, _of_links("gigabits_per_second", "virtual")] = Field(
        default=10.0, ge=1e-9, le=LARGE
    )
    """Rate of a virtual link, each way."""
    timeout: Annotated[float | None, _of_links("timeout", "auto", "mpi", "torch")] = Field(
        default=None, ge=0, le=LARGE
    )
    """Seconds a rank waits for another, then the job ends; 0: never; unset: 1800."""
    latency_microseconds: Annotated[float, _of_links("latency_microseconds", "virtual")] = Field(
        default=10.0, ge=0, le=LARGE
    )
    """Latency of a virtual link."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind != AUTO and kind not in LINKS:
            raise ValueError(f"it must be one of {AUTO}, {', '.join(LINKS)}")
        return kind


DROPS = Acts("checkpoint.keep_last is above 0", lambda run: run.checkpoint.keep_last)


class CheckpointSettings(Section):
    """[checkpoint] what survives."""

    acts: ClassVar[dict[str, Acts]] = {"checkpoint.*": TRAIN_OR_PLAN}

    every: int = Field(default=1, ge=1, le=MANY)
    """Epochs between checkpoints."""
    minutes: float = Field(default=15.0, ge=0, le=LARGE)
    """Write one in mid-epoch, too, when the last one is so old; 0: never."""
    keep_last: int = Field(default=2, ge=0, le=MANY)
    """Checkpoints to keep; 0: all."""
    best: Annotated[bool, DROPS, TESTED] = False
    """Keep the one with the best test metric, too, of those that are written."""
    rollbacks: int = Field(default=3, ge=0, le=MANY)
    """How often a run that diverges goes back to a checkpoint, with smaller steps; 0: never."""
