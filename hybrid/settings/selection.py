"""The metric that selects the best weights, and the direction of its better values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from hybrid.solvers.acting import unknown

Mode = Literal["min", "max"]
MODES: Mapping[str, Mode] = {"accuracy": "max", "loss": "min", "bits_per_byte": "min"}
"""The directions of this package's metrics."""


@dataclass(frozen=True)
class Selection:
    """The metric that train.early_stop and checkpoint.best follow."""

    metric: str = ""
    """Empty: the accuracy if it is measured, else the loss."""
    mode: Mode | None = None
    """None: the direction of a known metric."""

    def name(self, results: Iterable[str]) -> str:
        """Choose the metric to follow among measured results."""
        return self.metric or ("accuracy" if "accuracy" in results else "loss")

    def score(self, results: Mapping[str, Any]) -> float | None:
        """Return a number that is larger for better results; None without a finite result."""
        name = self.name(results)
        value = results.get(name)
        if not isinstance(value, int | float) or not isfinite(value):
            return None
        return float(value) if (self.mode or MODES.get(name)) == "max" else -float(value)


def check_metric(setting: str, metric: str, measured: Iterable[str]) -> None:
    """Reject a setting that names a metric that is not measured."""
    known = ["loss", *measured]
    if metric not in known:
        raise ValueError(f"{setting}: {unknown(metric, known, 'metric')}")


def check_mode(setting: str, metric: str, mode: Any, where: str) -> None:
    """Reject an unknown metric without a `mode`, the direction of its better values."""
    if mode is None and metric not in MODES:
        raise ValueError(
            f"{setting} is {metric!r}, a metric of your own: set {where} to min if smaller values "
            "are better, or to max"
        )
