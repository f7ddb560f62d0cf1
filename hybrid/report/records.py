"""The records of a run folder, validated as they are read."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from hybrid import files
from hybrid.files import read_whole
from hybrid.folder.manifest import Count, Rollback
from hybrid.folder.runfolder import MOST_BYTES
from hybrid.registries import LINKS
from hybrid.settings.config import Config
from hybrid.settings.resolve import MOST_BYTES as TOML_BYTES
from hybrid.settings.resolve import load
from hybrid.settings.sections.base import first_fault

Sizes = list[Annotated[int, Field(ge=0, lt=2**63)]]
MOST_OF_METRICS = 1 << 26
"""The most bytes of metrics.jsonl that a report reads."""

M = TypeVar("M", bound=BaseModel)


class MetricsLine(BaseModel):
    """The fields of a line of metrics.jsonl that reports use; tests may have other metrics."""

    model_config = ConfigDict(extra="allow")

    step: Count
    epoch: Count
    phase: str
    samples: Count = 0
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    seconds: float = 0.0
    idle: list[float] = []
    """Each rank's waiting share of the report's time, on a report's first line."""
    residual: list[float] = []
    """For each cut, ||lam - x|| / ||x||."""


class Results(dict[str, Any]):
    """The contents of summary.json, as keys and as attributes: `results.test_accuracy`.

    Every metric is there as `validation_NAME` and `test_NAME`.
    """

    solver: str
    model: str
    data: str
    blocks: int
    cuts: list[str]
    """The first unit of every block but the first."""
    replicas: int
    sync: str
    """The strategy of replicas; empty without any."""
    fill: str
    local_samples: Sizes
    """Samples of local work in a tick, by block."""
    epochs: int
    """Epochs trained since the run's start."""
    seed: int
    validation_accuracy: float | None
    """None without a validation set, or without a metric of that name."""
    validation_loss: float | None
    selected_on: str
    """The set by which weights were selected: validation, test or training; empty: no selection."""
    selected_by: str
    """The metric of that selection."""
    selected_epoch: int
    """The epoch of the network's final weights, which were tested."""
    test_accuracy: float | None
    """None without a test set, or without a metric of that name."""
    test_loss: float | None
    """None without a test set."""
    train_seconds: float
    """serial_seconds + parallel_seconds, without evaluation and checkpoints."""
    start_seconds: float | None
    """From the start of the first rank's process to its first step here."""
    serial_seconds: float
    parallel_seconds: float
    images_per_second: float
    """Samples of any kind per second of training."""
    idle_share: list[float]
    """Waiting share of the time, by rank."""
    local_steps: list[int]
    """Local steps during waits, by rank."""
    local_seconds: list[float]
    bytes_sent: Sizes
    delay: list[float]
    """Delay of the gradients in steps, by rank."""
    peak_memory_bytes: Sizes
    gpu_memory_bytes: list[int]
    checkpoint_seconds: list[float]
    """Seconds of waiting for checkpoints, by rank."""
    kernels: str
    links: str
    residual: list[float]
    """Relative primal residual after the last round, by cut."""
    returns_to_serial: int
    rollbacks: list[dict[str, Any]]
    proof: str
    """Comparison of the gradient with the undivided network's: passed, or why it was skipped."""

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(
                    f"a summary has no {name!r}; it has {', '.join(self)}"
                ) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]


@cache
def results_model() -> type[BaseModel]:
    """Make the model of `Results`; a missing field is None or an empty list."""
    hints = get_type_hints(Results, include_extras=True)
    hints |= {"rollbacks": list[Rollback], "stopped_early": str}
    fields: dict[str, Any] = {
        name: (hint, [] if get_origin(hint) is list else None) for name, hint in hints.items()
    }
    return create_model("Results", __config__=ConfigDict(extra="allow"), **fields)


def complete(values: Mapping[str, Any]) -> Results:
    """Make results with every field."""
    return Results(results_model().model_validate(values).model_dump())


@dataclass
class RunRecord:
    """A run as read from its folder."""

    run: Path
    settings: Config | None
    """None for a library run, which has no file of settings."""
    summary: Results
    """For a run that has not ended, the fields known from its settings and lines."""
    ended: bool
    lines: list[MetricsLine]

    @property
    def time_unit(self) -> str:
        links = self.summary.links
        return "s, simulated" if links in LINKS and LINKS[links].clocked else "s"


def subject(values: Mapping[str, Any]) -> str:
    """Name model, data and solver, as far as they are known."""
    network = " on ".join(filter(None, [values.get("model"), values.get("data")]))
    return ", ".join(filter(None, [network, values.get("solver")]))


def read(run: Path) -> RunRecord:
    """Read a run folder; ValueError if it is not one, or a file in it cannot be read."""
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(
            f"{run} is not a run folder (it has no metrics.jsonl): "
            "give the folder that hybrid train named at its end, or its --out"
        )
    lines = read_lines(run / "metrics.jsonl", MetricsLine)
    settings, path = _settings(run / "config.toml"), run / "summary.json"
    if ended := os.path.lexists(path):
        summary = Results(checked(results_model(), read_whole(path, MOST_BYTES), path).model_dump())
    else:
        summary = _so_far(settings, lines)
    return RunRecord(run, settings, summary, ended, lines)


def read_lines(path: Path, cls: type[M]) -> list[M]:
    """Read the complete lines of metrics.jsonl; ValueError if there are none yet."""
    numbered = enumerate(files.read_lines(path, MOST_OF_METRICS), 1)
    lines = [checked(cls, text, f"{path} line {n}") for n, text in numbered if text.strip()]
    if not lines:
        raise ValueError(
            f"{path} has 0 whole lines, and a report needs at least 1: "
            "wait for the run's first line, or start the run again"
        )
    return lines


def _settings(path: Path) -> Config | None:
    if not os.path.lexists(path):
        return None
    try:
        settings, text = load(None, {}, base=path), read_whole(path, TOML_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return settings if re.search(rb"^\s*[^#\s]", text, re.MULTILINE) else None


def checked(cls: type[M], content: bytes, place: object) -> M:
    """Parse a file or a line of one as `cls`; ValueError, naming the place, if it is invalid."""
    try:
        value = json.loads(content)
        if isinstance(value, dict):
            return cls.model_validate(value)
        fault = f"not a JSON object (but a {type(value).__name__})"
    except ValidationError as error:
        fault = first_fault(error)
    except (ValueError, RecursionError) as error:
        fault = f"not a JSON object ({' '.join(str(error).split())})"
    raise ValueError(f"{place}: {fault}: correct it or remove it")


def _so_far(settings: Config | None, lines: list[MetricsLine]) -> Results:
    residual = next((line.residual for line in reversed(lines) if line.residual), [])
    values: dict[str, Any] = {"residual": residual}
    if settings is not None:
        values |= {"solver": settings.solver["name"], "model": settings.model.name}
        values |= {"data": settings.data.name, "epochs": settings.train.epochs}
        values |= {"seed": settings.train.seed, "cuts": settings.split.cuts or []}
        values |= {"blocks": settings.split.blocks} if settings.split.blocks else {}
    return complete(values)
