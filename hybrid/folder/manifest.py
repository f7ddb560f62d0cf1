"""The declaration of a checkpoint's manifest, by which it is validated before it is used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybrid.settings.sections.base import first_fault

MOST_BYTES = 1 << 24
"""The largest manifest read; one of a thousand units has 0.3 MB."""

LARGEST_BUDGET = 1 << 20
"""The most samples of local work in a tick; a block does fewer than a mini-batch has."""
Count = Annotated[int, Field(ge=0, lt=2**53)]
# a plain name: no folder, and no way out of the checkpoint's own
FileName = Annotated[str, Field(pattern=r"^[^/\x00]+\.safetensors$", max_length=255)]


class ManifestPart(BaseModel):
    """A part of a manifest, with exactly the declared types."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class TensorFile(ManifestPart):
    """A file of tensors."""

    file: FileName
    sha256: str
    bytes: Count
    host: Annotated[str, Field(max_length=255)] = ""
    """Whose disk has it, where each host keeps its own."""


class LeftOut(ManifestPart):
    """A frozen weight that no file has: the network that is given has it."""

    shape: list[Count]
    dtype: str
    sha256: str


class CheckpointFiles(ManifestPart):
    """The parts of every checkpoint's manifest."""

    step: Count
    run: Annotated[str, Field(max_length=64)] = ""
    """The same in all checkpoints of a run."""
    units: dict[str, TensorFile]
    states: dict[str, TensorFile]
    frozen: dict[str, LeftOut] = {}


class RoundsState(ManifestPart):
    """`Rounds.state` of `hybrid.rounds`, with the state of alternating rounds."""

    count: Count
    returns: Count
    probe: list[float] = []
    resting: bool = False
    length: Count = 0
    recorded: bool = False


class SharedState(ManifestPart):
    """The state of a run's parts that is the same on every rank."""

    rounds: RoundsState


class Rollback(ManifestPart):
    """An entry of `hybrid.training.checkpointing.Position.rollbacks`."""

    step: Count
    reason: str
    to: Count
    rates: dict[str, float]


class RunPosition(ManifestPart):
    """What a run needs to continue; lists are per rank, `residual` per cut."""

    solver: str
    model: str
    data: str
    seed: int
    step: Count
    epoch: Count
    tensors: Count
    """How many the whole network saves."""
    samples: Count
    """Training samples, without those that are held out for validation."""
    steps_per_epoch: Annotated[int, Field(ge=1, lt=2**53)]
    window: Annotated[int, Field(ge=1, lt=2**53)]
    cuts: list[str]
    replicas: Annotated[int, Field(ge=1, lt=2**31)]
    sync: str
    carried_as: list[Any]
    fill: list[str]
    part: Count
    first_trained: Count
    ties: list[list[Count]]
    local_budget: list[list[Annotated[int, Field(ge=0, le=LARGEST_BUDGET)]]]
    tested: dict[str, Annotated[float, Field(allow_inf_nan=True)]]
    """Loss and metrics by name; not a number for weights that are about to diverge."""
    tested_on: Literal["validation", "test", ""]
    """The set on which they were measured."""
    tested_step: Count | None
    """The step at which the weights were measured."""
    epoch_loss: Annotated[list[float], Field(min_length=2, max_length=2)]
    """The sum of this epoch's training losses so far, and of how many samples it is."""
    residual: list[float]
    shared: SharedState
    rollbacks: list[Rollback]
    totals: list[dict[str, float]]

    @model_validator(mode="after")
    def _fits_together(self) -> "RunPosition":
        done = self.step - self.epoch * self.steps_per_epoch
        if not 0 <= done < self.steps_per_epoch:
            raise ValueError(
                f"step {self.step} is not within epoch {self.epoch} of {self.steps_per_epoch} steps"
            )
        blocks = len(self.cuts) + 1
        sizes = (len(self.residual) + 1, len(self.totals))
        if sizes != (blocks, blocks * self.replicas):
            raise ValueError(
                f"{blocks} blocks of {self.replicas} replicas have {sizes} residuals and totals"
            )
        return self


P = TypeVar("P", bound=ManifestPart)


def check(cls: type[P], body: Mapping[str, Any], path: Path) -> None:
    """ValueError, naming the file and the first fault, unless `body` is as `cls` says."""
    try:
        cls.model_validate(body)
    except ValidationError as error:
        raise ValueError(
            f"{path} is no manifest of this program: {first_fault(error)}; do not use a checkpoint "
            "of unknown origin"
        ) from None
