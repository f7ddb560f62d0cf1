"""The metric that decides which weights are best, and which of its values are better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from hybrid.solvers.acting import unknown

Mode = Literal["min", "max"]
MODES: Mapping[str, Mode] = {"accuracy": "max", "loss": "min", "bits_per_byte": "min"}
"""The better values of the metrics that this package knows."""


@dataclass(frozen=True)
class Selection:
    """What train.early_stop and checkpoint.best follow."""

    metric: str = ""
    """Empty: the accuracy where it is measured, else the loss."""
    mode: Mode | None = None
    """None: that of a known metric."""

    def name(self, results: Iterable[str]) -> str:
        """The metric that is followed among those that are measured."""
        return self.metric or ("accuracy" if "accuracy" in results else "loss")

    def score(self, results: Mapping[str, Any]) -> float | None:
        """A number that is larger for better results; None where no finite one was measured."""
        name = self.name(results)
        value = results.get(name)
        if not isinstance(value, int | float) or not isfinite(value):
            return None
        return float(value) if (self.mode or MODES.get(name)) == "max" else -float(value)


def check_metric(setting: str, metric: str, measured: Iterable[str]) -> None:
    """ValueError for a setting that names what is not measured."""
    known = ["loss", *measured]
    if metric not in known:
        raise ValueError(f"{setting}: {unknown(metric, known, 'metric')}")


def check_mode(setting: str, metric: str, mode: Any, where: str) -> None:
    """ValueError if neither `mode` nor this package says which values of a metric are better."""
    if mode is None and metric not in MODES:
        raise ValueError(
            f"{setting} is {metric!r}, a metric of your own: set {where} to min if smaller values "
            "are better, or to max"
        )
