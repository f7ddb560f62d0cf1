"""What a run folder says about its run, validated as it is read."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid import files
from hybrid.files import read_whole
from hybrid.folder.manifest import Rollback
from hybrid.folder.runfolder import MOST_BYTES
from hybrid.registries import LINKS
from hybrid.settings.config import Config
from hybrid.settings.resolve import MOST_BYTES as TOML_BYTES
from hybrid.settings.resolve import load
from hybrid.settings.sections.base import first_fault

Numbers = Annotated[list[float], Field(max_length=4096)]
Sizes = list[Annotated[int, Field(ge=0, lt=2**63)]]
MOST_LINES, MOST_OF_METRICS = 1 << 18, 1 << 28
"""The most lines of metrics that a report takes, and their most bytes."""

M = TypeVar("M", bound=BaseModel)


class Line(BaseModel):
    """What the report shows of a line of metrics.jsonl; a line of a test has other metrics, too."""

    model_config = ConfigDict(extra="allow")

    step: int = Field(ge=0, lt=2**53)
    epoch: int = Field(ge=0, lt=2**53)
    phase: str
    samples: int = Field(default=0, ge=0, lt=2**53)
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    seconds: float = 0.0
    idle: Numbers = []
    """Share of the report's time in which each rank waited, on a report's first line."""
    residual: Numbers = []
    """For each cut, ||lam - x|| / ||x||."""


class SummaryFile(BaseModel):
    """summary.json, or as much of it as is known of a run that has not ended.

    It also has every metric of the validation and the test set, as validation_NAME and test_NAME.
    """

    model_config = ConfigDict(extra="allow")

    solver: str | None = None
    model: str | None = None
    data: str | None = None
    blocks: int | None = None
    cuts: list[str] = []
    replicas: int | None = None
    epochs: int | None = None
    seed: int | None = None
    links: str | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    selected_on: str | None = None
    """The set by which weights were selected: validation, test or training; empty: none were."""
    selected_by: str | None = None
    selected_epoch: int | None = None
    """The epoch after which the weights were that were tested."""
    train_seconds: float | None = None
    images_per_second: float | None = None
    serial_seconds: float | None = None
    parallel_seconds: float | None = None
    fill: str = "none"
    local_samples: Sizes = []
    idle_share: list[float] = []
    delay: list[float] = []
    bytes_sent: Sizes = []
    peak_memory_bytes: Sizes = []
    residual: list[float] = []
    stopped_early: str | None = None
    rollbacks: list[Rollback] = []
    checkpoint_seconds: list[float] = []
    proof: str | None = None
    """Whether its gradient was compared with the undivided network's: passed, or why not."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the validation and the test set that have no field."""
        extra = (self.model_extra or {}).items()
        sets = ("validation_", "test_")
        return {k: v for k, v in extra if k.startswith(sets) and isinstance(v, int | float)}

    @property
    def selected(self) -> str | None:
        """Which weights were tested and, where there was a choice, by what they were selected."""
        if not self.selected_on or self.selected_epoch is None:
            return None
        on = "training" if self.selected_on == "training" else f"{self.selected_on} set's"
        return f"after epoch {self.selected_epoch}, selected by the {on} {self.selected_by}"

    @property
    def seconds(self) -> str:
        """The unit of all times of the run."""
        clocked = self.links is not None and self.links in LINKS and LINKS[self.links].clocked
        return "s, simulated" if clocked else "s"


@dataclass
class Record:
    """A run, as its folder has it."""

    run: Path
    settings: Config | None
    """None for a library run, whose settings are in no file."""
    summary: SummaryFile
    ended: bool
    lines: list[Line]


def read(run: Path) -> Record:
    """Read a run folder; ValueError if it is none, or if a file in it cannot be read."""
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(
            f"{run} is not a run folder (it has no metrics.jsonl): "
            "give the folder that hybrid train named at its end, or its --out"
        )
    lines, settings = read_lines(run / "metrics.jsonl", Line), _settings(run / "config.toml")
    path = run / "summary.json"
    ended = os.path.lexists(path)
    summary = (
        checked(SummaryFile, read_whole(path, MOST_BYTES), path)
        if ended
        else _so_far(settings, lines)
    )
    return Record(run, settings, summary, ended, lines)


def trained(model: str | None, data: str | None, solver: str | None) -> str:
    """What was trained on what and how, as far as it is known."""
    return ", ".join(filter(None, [" on ".join(filter(None, [model, data])), solver]))


def read_lines(path: Path, cls: type[M]) -> list[M]:
    """The whole lines of metrics.jsonl; ValueError if there is none yet."""
    found: list[M] = []
    for n, text in enumerate(files.read_lines(path, MOST_OF_METRICS), 1):
        if n > MOST_LINES:
            raise ValueError(
                f"{path} has more than {MOST_LINES} lines, the most that a report takes: make it "
                "of a copy of the run with fewer of them"
            )
        if text.strip():
            found.append(checked(cls, text, f"{path} line {n}"))
    if not found:
        raise ValueError(
            f"{path} has 0 whole lines, and a report needs at least 1: "
            "wait for the run's first line, or start the run again"
        )
    return found


def _settings(path: Path) -> Config | None:
    if not os.path.lexists(path):
        return None
    try:
        resolved, text = load(None, {}, base=path), read_whole(path, TOML_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return resolved if re.search(rb"^\s*[^#\s]", text, re.MULTILINE) else None


def checked(cls: type[M], content: bytes, place: object) -> M:
    """A file, or a line of one, as `cls`; ValueError, naming the place, if it is something else."""
    try:
        found = json.loads(content)
        if isinstance(found, dict):
            return cls.model_validate(found)
        fault = f"not a JSON object (but a {type(found).__name__})"
    except ValidationError as error:
        fault = first_fault(error)
    except (ValueError, RecursionError) as error:
        fault = f"not a JSON object ({' '.join(str(error).split())})"
    raise ValueError(f"{place}: {fault}: correct it or remove it")


def _so_far(settings: Config | None, lines: list[Line]) -> SummaryFile:
    """The summary of a run that has not ended, as far as its lines and settings tell."""
    unfinished = SummaryFile(
        residual=next((line.residual for line in reversed(lines) if line.residual), [])
    )
    if settings is not None:
        unfinished.solver, unfinished.seed = settings.solver["name"], settings.train.seed
        unfinished.model, unfinished.data = settings.model.name, settings.data.name
        unfinished.blocks, unfinished.cuts = settings.split.blocks, settings.split.cuts
        unfinished.epochs = settings.train.epochs
    return unfinished
