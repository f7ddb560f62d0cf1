"""Curves of one or several runs: quantities of metrics.jsonl over epochs and over time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, nan
from statistics import mean

from hybrid.report.page import COLORS, LARGEST, Chart
from hybrid.report.records import MetricsLine, RunRecord

TRAINING, VALIDATION, TEST = ("serial", "parallel"), ("validation",), ("test",)
"""The phases of a line."""
ALL = (*TRAINING, *VALIDATION, *TEST)
_SEVERAL = 8
"""The most ranks or cuts with a curve each; for more there are curves of minimum and maximum."""


@dataclass
class Group:
    """Runs that differ only in their seed, which share a curve and its label."""

    label: str
    records: list[RunRecord]


@dataclass(frozen=True)
class Panel:
    """A chart of a quantity of metrics.jsonl, with the unit of its y axis."""

    title: str
    unit: str
    value: Callable[[MetricsLine], float | list[float] | None]
    """Reads the quantity from a line; None if the line lacks it."""
    phases: Sequence[str] = ALL
    """The phases to draw, a curve each; phases of a group share a curve."""
    places: str = ""
    """"rank" or "cut", if the value is a list with a curve for each."""
    log: bool = False
    by_time: bool = False

    def points(self, record: RunRecord, label: str) -> dict[str, dict[int, float]]:
        """Return label of a curve -> step -> value, the first value of each step.

        Without a label, a single training phase is called "training".
        """
        points: dict[str, dict[int, float]] = {}
        training = {line.phase for line in record.lines}.intersection(TRAINING)
        for line in record.lines:
            value = self.value(line) if line.phase in self.phases else None
            if isinstance(value, list):
                values = _each(self.places, value)
            else:
                values = {label or ("training" if training == {line.phase} else line.phase): value}
            for name, y in values.items():
                if y is not None and abs(y) < LARGEST:
                    points.setdefault(name, {}).setdefault(line.step, y)
        return points


def _each(places: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return a value for each rank or cut, or the extremes if there are many."""
    if len(values) <= _SEVERAL:
        return {f"{places} {i}": value for i, value in enumerate(values, places == "cut")}
    finite = [value for value in values if isfinite(value)] or [nan]
    return {"least": min(finite), "greatest": max(finite)}


def _loss(line: MetricsLine) -> float | None:
    tested = {"validation": line.validation_loss, "test": line.test_loss}
    return tested.get(line.phase, line.loss)


def _accuracy(line: MetricsLine) -> float | None:
    tested = {"validation": line.validation_accuracy, "test": line.test_accuracy}
    share = tested.get(line.phase, line.accuracy)
    return None if share is None else 100 * share


def _throughput(line: MetricsLine) -> float | None:
    return line.samples / line.seconds if line.seconds > 0 and line.samples else None


RUN = (
    Panel("Loss", "loss", _loss, log=True, by_time=True),
    Panel("Accuracy", "accuracy, %", _accuracy, by_time=True),
    Panel(
        "Relative primal residual ‖λ - x‖ / ‖x‖ at each cut",
        "relative residual",
        lambda line: [value if value > 0 else nan for value in line.residual],
        places="cut",
        log=True,
    ),
    Panel("Throughput", "samples/s", _throughput, TRAINING),
    Panel(
        "Idle share of each rank",
        "waited, %",
        lambda line: [100 * share for share in line.idle],
        places="rank",
    ),
)
"""The panels of one run."""
COMPARED = (
    Panel("Validation accuracy", "accuracy, %", _accuracy, VALIDATION, by_time=True),
    Panel("Validation loss", "loss", _loss, VALIDATION, by_time=True),
    Panel("Test accuracy", "accuracy, %", _accuracy, TEST, by_time=True),
    Panel("Test loss", "loss", _loss, TEST, by_time=True),
    Panel("Training loss", "loss", _loss, TRAINING, log=True, by_time=True),
    Panel("Throughput", "samples/s", _throughput, TRAINING),
)
"""The panels of several runs."""


def curves(panels: Sequence[Panel], groups: Sequence[Group]) -> Iterator[tuple[str, Chart]]:
    """Yield title and chart of each quantity of the runs, by epochs and, for some, by time."""
    records = [record for group in groups for record in group.records]
    epochs = "epochs" if all(map(_epochs_a_step, records)) else "steps"
    simulated = ", simulated" if any("simulated" in x.time_unit for x in records) else ""
    for panel in panels:
        for axis in (epochs, f"seconds of training{simulated}")[: 1 + panel.by_time]:
            chart = Chart(axis, panel.unit, log=panel.log)
            _draw(chart, panel, groups, axis)
            if not chart.empty:
                yield f"{panel.title}, by {axis}" if panel.by_time else panel.title, chart


def _draw(chart: Chart, panel: Panel, groups: Sequence[Group], axis: str) -> None:
    """Draw the mean of each group's runs, and a band from minimum to maximum."""
    for number, group in enumerate(groups):
        runs = [(_places(x, axis), panel.points(x, group.label)) for x in group.records]
        labels = dict.fromkeys(label for _, points in runs for label in points)
        for color, label in enumerate(labels, number):
            having = [(places, points[label]) for places, points in runs if label in points]
            common = sorted(set.intersection(*(set(points) for _, points in having)))
            if not common:
                continue
            xs = [mean(places[step] for places, _ in having) for step in common]
            ys = [[points[step] for _, points in having] for step in common]
            shade = COLORS[color % len(COLORS)]
            if len(having) > 1:
                chart.band(xs, [min(y) for y in ys], [max(y) for y in ys], shade)
            chart.curve(xs, [mean(y) for y in ys], shade, label)


def _places(record: RunRecord, axis: str) -> dict[int, float]:
    """Return step -> place on the axis."""
    if axis in ("steps", "epochs"):
        scale = 1 if axis == "steps" else _epochs_a_step(record)
        return {line.step: line.step * scale for line in record.lines}
    times = accumulate(line.seconds for line in record.lines)
    return {line.step: time for line, time in zip(record.lines, times, strict=True)}


def _epochs_a_step(record: RunRecord) -> float:
    """Compute epochs per step from the end of an epoch; 0 before the first one."""
    return max((line.epoch / line.step for line in record.lines if line.step), default=0.0)
