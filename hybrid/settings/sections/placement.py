"""[split], [links] and [checkpoint]: placement, communication and checkpoints."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from hybrid.registries import AUTO, LINKS
from hybrid.settings.sections.base import (
    LARGE,
    MANY,
    TESTED,
    TRAIN,
    TRAIN_OR_BENCH,
    TRAIN_OR_PLAN,
    Section,
)
from hybrid.solvers.acting import REPLICAS, Acts, Needs, fault_of
from hybrid.solvers.named import is_reference

BALANCED = Acts(
    "the command is train or bench, or the model is your own",
    lambda run: run.command != "plan" or is_reference(run.model.name),
)
KEEPS_UNITS = Needs(
    "model.survival is 1, since replicas would leave out different units",
    lambda run: run.replicas == 1 or run.survival == 1,
    "take one replica",
)


class SplitSettings(Section):
    """[split] units into blocks."""

    blocks: Annotated[int, TRAIN_OR_BENCH] = Field(default=0, ge=0, le=MANY)
    """Number of blocks; 0: ranks divided by replicas, or 2 in one process."""
    balance: Annotated[Literal["operations", "measured", "even"], BALANCED] = "operations"
    """What blocks share evenly: counted operations (machine-independent), measured time, units."""
    cuts: list[str] = Field(default=[])
    """First unit of each block after the first; overrides balance."""
    inside: bool | None = None
    """Cut inside units, too, where blocks of whole ones would be uneven. Unset: where there are
    fewer units than blocks or times are measured, if the method may pass several tensors."""
    speeds: Annotated[list[float] | Literal["measured"], TRAIN_OR_PLAN] = Field(default=[])
    """Relative speed of each block's machine (its slowest replica's); cuts follow. measured: by
    passes on each rank at the start."""
    memory: Annotated[list[float] | Literal["measured"], TRAIN_OR_PLAN] = Field(default=[])
    """GB (10^9 bytes) of each block's machine (its smallest replica's), which cuts must not exceed.
    measured: what each host has available, shared among its ranks."""
    replicas: Annotated[int, KEEPS_UNITS] = Field(default=0, ge=0, le=MANY)
    """Replicas of the chain; 0: ranks divided by blocks, or 1 in one process."""
    side_by_side: Annotated[Literal["auto", "chain", "peers"], REPLICAS] = "auto"
    """What adjacent ranks share: a chain or a block's replicas; auto: whichever sends more."""

    @field_validator("speeds", "memory", mode="before")
    @classmethod
    def _of_machines(cls, value: Any) -> Any:
        if value != "measured" and (fault := fault_of(value)):
            raise ValueError(f"{fault}, or measured")
        return value

    @field_validator("inside")
    @classmethod
    def _searched(cls, inside: bool | None, info: ValidationInfo) -> bool | None:
        if inside is not None and info.data.get("cuts"):
            raise ValueError("split.cuts settles the blocks: leave one of the two out")
        return inside

    @property
    def count(self) -> int:
        """The number of blocks that these settings ask for; 0: it is open."""
        numbers = [len(x) for x in (self.speeds, self.memory) if x != "measured"]
        return self.blocks or len(self.cuts) + bool(self.cuts) or max(numbers, default=0)


def _of_links(name: str, *kinds: str) -> Acts:
    """Make the condition that the links between the ranks read a setting."""
    return Acts(f"links.kind reads it ({', '.join(kinds)})", lambda run: name in run.link_settings)


class LinkSettings(Section):
    """[links] how the blocks reach each other."""

    acts: ClassVar[dict[str, Acts]] = {"links.*": TRAIN_OR_PLAN}

    kind: str = LINKS.default
    """Transport: threads, mpi, torch, virtual (simulated); auto: MPI under mpirun, torch under
    torchrun, else threads."""
    device: Annotated[
        Literal["auto", "nccl", "mpi", "host"], TRAIN, _of_links("device", "auto", "mpi", "torch")
    ] = "auto"
    """How tensors travel between GPUs: nccl, mpi (CUDA-aware, which is tried first), or through
    the host; auto: nccl if each rank has its own GPU and links.kind is auto or torch, else host."""
    gigabits_per_second: Annotated[float, _of_links("gigabits_per_second", "virtual")] = Field(
        default=10.0, ge=1e-9, le=LARGE
    )
    """Bandwidth of a simulated link in Gb/s, each way."""
    timeout: Annotated[float | None, _of_links("timeout", "auto", "mpi", "torch")] = Field(
        default=None, ge=0, le=LARGE
    )
    """Seconds a rank waits for another before the job ends; 0: forever; unset: 1800."""
    latency_microseconds: Annotated[float, _of_links("latency_microseconds", "virtual")] = Field(
        default=10.0, ge=0, le=LARGE
    )
    """Latency of a simulated link in microseconds."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind != AUTO and kind not in LINKS:
            raise ValueError(f"it must be one of {AUTO}, {', '.join(LINKS)}")
        return kind


FREEZES = Acts("a parameter is frozen for the whole run", lambda run: run.frozen)
DROPS = Acts("checkpoint.keep_last is above 0", lambda run: run.checkpoint.keep_last)


class CheckpointSettings(Section):
    """[checkpoint] what survives."""

    acts: ClassVar[dict[str, Acts]] = {"checkpoint.*": TRAIN_OR_PLAN}

    every: int = Field(default=1, ge=1, le=MANY)
    """Epochs between checkpoints."""
    steps: int = Field(default=0, ge=0, le=MANY)
    """Mini-batches between checkpoints within an epoch, each at the next report; 0: none."""
    minutes: float = Field(default=15.0, ge=0, le=LARGE)
    """Age at which a checkpoint is also written within an epoch, unless such checkpoints would take
    more than a twentieth of the time; 0: never."""
    keep_last: int = Field(default=2, ge=0, le=MANY)
    """Number of checkpoints to keep; 0: all."""
    copies: int = Field(default=2, ge=0, le=MANY)
    """Disks with whole checkpoints, where hosts do not share the run folder; 0: each host keeps the
    files of its ranks."""
    best: Annotated[bool, DROPS, TESTED] = False
    """Also keep the checkpoint with the best train.metric, and end with its weights."""
    rollbacks: int = Field(default=3, ge=0, le=MANY)
    """How often a diverging run goes back to a checkpoint with smaller steps; 0: never."""
    frozen: Annotated[bool | Literal["auto"], FREEZES] = "auto"
    """Whether checkpoints have the weights that are frozen for the whole run; false: the SHA-256
    of each, and the network that is given has them; auto: true, but not for a network of peft's."""
