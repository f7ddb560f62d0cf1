"""Curves of one run, or of several: quantities of metrics.jsonl over epochs and over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, nan
from statistics import mean

from hybrid.report.page import COLORS, LARGEST, Chart
from hybrid.report.records import Line, Record

TRAINING, VALIDATION, TEST = ("serial", "parallel"), ("validation",), ("test",)
"""The phases of a line."""
_SEVERAL = 8
"""Of more ranks or cuts there are two curves: the least and the greatest value."""


@dataclass
class Group:
    """Runs that differ only in their seed, which share a curve, and its name."""

    label: str
    records: list[Record]


@dataclass(frozen=True)
class Panel:
    """A quantity of the lines of metrics.jsonl: what a chart shows, and the unit of its y axis."""

    title: str
    unit: str
    values: Callable[[Line], Mapping[str, float | None]]
    """Of a line: the value of each curve by its label; None is a line without the quantity."""
    log: bool = False
    by_time: bool = False

    def points(self, record: Record) -> dict[str, dict[int, float]]:
        """Label of a curve -> step -> value, the first one where a step has several.

        The phase that trains has the name "training", unless there are two.
        """
        points: dict[str, dict[int, float]] = {}
        phases = {line.phase for line in record.lines}.intersection(TRAINING)
        alone = phases if len(phases) == 1 else ()
        for line in record.lines:
            for label, value in self.values(line).items():
                if value is not None and abs(value) < LARGEST:
                    label = "training" if label in alone else label
                    points.setdefault(label, {}).setdefault(line.step, value)
        return points


def _by_phase(of: Callable[[Line], float | None]) -> Callable[[Line], dict[str, float | None]]:
    """A curve for each phase that trains, and for the validation and the test."""
    known = (*TRAINING, *VALIDATION, *TEST)  # of a damaged line the phase may be anything
    return lambda line: {line.phase: of(line)} if line.phase in known else {}


def _one(
    of: Callable[[Line], float | None], phases: Sequence[str]
) -> Callable[[Line], dict[str, float | None]]:
    """One curve, of the lines of some phases."""
    return lambda line: {"": of(line)} if line.phase in phases else {}


def _each(name: str, values: Sequence[float], first: int) -> dict[str, float]:
    """A curve for each rank or cut, unless they are many."""
    if len(values) <= _SEVERAL:
        return {f"{name} {number}": value for number, value in enumerate(values, first)}
    finite = [value for value in values if isfinite(value)] or [nan]
    return {"least": min(finite), "greatest": max(finite)}


def _loss(line: Line) -> float | None:
    measured = {"validation": line.validation_loss, "test": line.test_loss}
    return measured.get(line.phase, line.loss)


def _accuracy(line: Line) -> float | None:
    measured = {"validation": line.validation_accuracy, "test": line.test_accuracy}
    share = measured.get(line.phase, line.accuracy)
    return None if share is None else 100 * share


def _throughput(line: Line) -> float | None:
    trained = line.phase in TRAINING and line.seconds > 0 and line.samples
    return line.samples / line.seconds if trained else None


RUN = (
    Panel("Loss", "loss", _by_phase(_loss), log=True, by_time=True),
    Panel("Accuracy", "accuracy, %", _by_phase(_accuracy), by_time=True),
    Panel(
        "Relative primal residual ‖λ - x‖ / ‖x‖ at each cut",
        "relative residual",
        lambda x: _each("cut", [value if value > 0 else nan for value in x.residual], 1),
        log=True,
    ),
    Panel("Throughput", "samples/s", _by_phase(_throughput)),
    Panel(
        "Idle share of each rank",
        "waited, %",
        lambda x: _each("rank", [100 * share for share in x.idle], 0),
    ),
)
"""Of one run."""
COMPARED = (
    Panel("Validation accuracy", "accuracy, %", _one(_accuracy, VALIDATION), by_time=True),
    Panel("Validation loss", "loss", _one(_loss, VALIDATION), by_time=True),
    Panel("Test accuracy", "accuracy, %", _one(_accuracy, TEST), by_time=True),
    Panel("Test loss", "loss", _one(_loss, TEST), by_time=True),
    Panel("Training loss", "loss", _one(_loss, TRAINING), log=True, by_time=True),
    Panel("Throughput", "samples/s", _one(_throughput, TRAINING)),
)
"""Of several."""


def curves(panels: Sequence[Panel], groups: Sequence[Group]) -> Iterator[tuple[str, Chart]]:
    """Title and chart of each quantity that the runs have, by epochs and perhaps by time."""
    records = [record for group in groups for record in group.records]
    epochs = "epochs" if all(map(_epochs_a_step, records)) else "steps"
    simulated = ", simulated" if any("simulated" in x.summary.seconds for x in records) else ""
    for panel in panels:
        for axis in (epochs, f"seconds of training{simulated}")[: 1 + panel.by_time]:
            chart = Chart(axis, panel.unit, log=panel.log)
            _draw(chart, panel, groups, axis)
            if not chart.empty:
                by = f"{panel.title}, by {axis}" if panel.by_time else panel.title
                yield by, chart


def _draw(chart: Chart, panel: Panel, groups: Sequence[Group], axis: str) -> None:
    """The mean of the runs of each group, and a band from the least to the greatest."""
    for number, group in enumerate(groups):
        runs = [(_places(record, axis), panel.points(record)) for record in group.records]
        labels = dict.fromkeys(label for _, points in runs for label in points)
        for place, label in enumerate(labels, number):
            having = [(places, points[label]) for places, points in runs if label in points]
            common = sorted(set.intersection(*(set(points) for _, points in having)))
            if not common:
                continue
            xs = [mean(places[step] for places, _ in having) for step in common]
            ys = [[points[step] for _, points in having] for step in common]
            color = COLORS[place % len(COLORS)]
            if len(having) > 1:
                chart.band(xs, [min(y) for y in ys], [max(y) for y in ys], color)
            chart.curve(xs, [mean(y) for y in ys], color, group.label or label)


def _places(record: Record, axis: str) -> dict[int, float]:
    """Step -> its place on the axis."""
    lines = record.lines
    if axis == "steps":
        return {line.step: line.step for line in lines}
    if axis == "epochs":
        epochs_a_step = _epochs_a_step(record)
        return {line.step: line.step * epochs_a_step for line in lines}
    times = accumulate(line.seconds for line in lines)
    return {line.step: time for line, time in zip(lines, times, strict=True)}


def _epochs_a_step(record: Record) -> float:
    """Its lines have whole epochs, so the end of an epoch tells; 0 before the first one."""
    return max((line.epoch / line.step for line in record.lines if line.step), default=0.0)
