"""Several runs beside each other: runs that differ only in their seed share a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from math import isfinite
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

from hybrid.report.chart import SEVERAL, Chart
from hybrid.report.page import Html, drawing, heading, page, paragraph, row, table
from hybrid.report.records import Line, Record, read
from hybrid.report.tables import UNKNOWN, amount

SEED, LINKS = "train.seed", "links.kind"
_PLACES = ("data.dir",)
"""Settings of where things lie, which make no difference to a run."""


@dataclass
class Group:
    """Runs that differ only in their seed."""

    label: str
    records: list[Record]

    def values(self, name: str) -> list[float]:
        """A number of the summary of each run that has it, of a list the largest."""
        found = [getattr(record.summary, name) for record in self.records]
        return [float(max(x) if isinstance(x, list) else x) for x in found if x not in (None, [])]

    @property
    def epochs(self) -> str:
        """The epochs after which its runs were tested last."""
        tested = [[x.epoch for x in record.lines if x.phase == "test"] for record in self.records]
        return " and ".join(map(str, sorted({own[-1] for own in tested if own})))

    @property
    def data(self) -> str:
        """What its runs were trained on."""
        record = self.records[0]
        limit = 0 if record.settings is None else record.settings.data.limit
        name = str(record.summary.data)
        return f"{limit} samples of {name}" if limit else name


def compared(runs: Sequence[Path]) -> bytes:
    """A page about several run folders; ValueError for one that cannot be read."""
    records = [read(run) for run in runs]
    flat = [_flat(record) for record in records]
    keys = sorted({key for settings in flat for key in settings})
    differ = [k for k in keys if len({repr(s.get(k)) for s in flat}) > 1 and k != SEED]
    groups = _groups(records, flat, differ)
    parts = [_overview(groups), _settings(groups, differ)]
    parts += [heading(2, "Curves"), *(_curves(groups))]
    return page(f"{len(records)} runs compared", parts)


def _flat(record: Record) -> dict[str, Any]:
    """Settings by "section.key"; those of a library run come from its summary.

    The links are those that joined the ranks, as `auto` is another one under each launcher.
    """
    told = record.summary
    joined = {} if told.links is None else {LINKS: told.links}
    if record.settings is None:
        known = {"model.name": told.model, "solver.name": told.solver, "split.blocks": told.blocks}
        return known | joined
    tree = record.settings.model_dump()
    flat = {f"{section}.{key}": v for section, table in tree.items() for key, v in table.items()}
    return {key: value for key, value in flat.items() if key not in _PLACES} | joined


def _groups(
    records: Sequence[Record], flat: Sequence[dict[str, Any]], differ: Sequence[str]
) -> list[Group]:
    found: dict[tuple[str, ...], list[int]] = {}
    for i, settings in enumerate(flat):
        found.setdefault(tuple(repr(settings.get(key)) for key in differ), []).append(i)
    groups = []
    for numbers in found.values():
        settings = flat[numbers[0]]
        name = str(settings.get("solver.name"))
        # the settings in which it differs from others of the same method
        same = [flat[i] for i in range(len(flat)) if flat[i].get("solver.name") == name]
        own = [k for k in differ if len({repr(s.get(k)) for s in same}) > 1]
        more = [_said(key, settings[key]) for key in own if key in settings]
        groups.append(Group(", ".join([name, *more]), [records[i] for i in numbers]))
    return groups


def _said(key: str, value: object) -> str:
    """A setting in the name of a group."""
    return str(value) if key == LINKS else f"{key.partition('.')[2]} {value}"


def _overview(groups: Sequence[Group]) -> Html:
    """A row for each group, with its difference in accuracy from the first one."""

    def cells(group: Group) -> list[str]:
        accuracy = group.values("test_accuracy")
        peak = group.values("peak_memory_bytes")
        return [
            group.label,
            str(len(group.records)),
            _spread(accuracy, ".2f", " %", 100),
            _gain(group, groups[0]),
            _spread(group.values("test_loss"), ".3g"),
            _spread(group.values("train_seconds"), ".1f", " s"),
            _spread(group.values("images_per_second"), ",.0f"),
            _spread(group.values("idle_share"), ".1f", " %", 100),
            amount(int(mean(peak))) if peak else UNKNOWN,
        ]

    header = ["", "runs", "test accuracy", "points", "test loss", "training", "images/s"]
    header += ["idle, most", "peak memory"]
    rows = [header, *map(cells, groups)]
    # nothing is told of a single group, or without accuracies
    told = [column for column in zip(*rows, strict=True) if {*column[1:]} - {"", UNKNOWN}]
    header, *rows = map(list, zip(*told, strict=True))
    return table("Runs", header, rows)


def _gain(group: Group, first: Group) -> str:
    """Points of accuracy over the first group's, and why the two cannot be compared."""
    mine, theirs = group.values("test_accuracy"), first.values("test_accuracy")
    if group is first or not (mine and theirs):
        return "" if group is first else UNKNOWN
    why = []
    if group.epochs != first.epochs:
        why.append(f"{group.epochs} epochs, not {first.epochs}")
    if group.data != first.data:
        why.append(f"on {group.data}, not {first.data}")
    points = f"{100 * (mean(mine) - mean(theirs)):+.2f}"
    return f"{points} ({'; '.join(why)})" if why else points


def _spread(values: Sequence[float], form: str, unit: str = "", scale: float = 1.0) -> str:
    """The mean and, of several values, the standard deviation."""
    if not values:
        return UNKNOWN
    scaled = [scale * value for value in values]
    more = len(scaled) > 1 and all(abs(value) < 1e100 for value in scaled)
    told = [fmean(scaled), *([stdev(scaled)] if more else [])]
    # no break within a cell
    return (" ± ".join(format(x, form) for x in told) + unit).replace(" ", "\N{NO-BREAK SPACE}")


def _settings(groups: Sequence[Group], differ: Sequence[str]) -> Html:
    flat = [_flat(group.records[0]) for group in groups]
    if not differ:
        return paragraph("The runs have the same settings, but for their seeds.")
    # what only one method has makes no difference between two
    common = [k for k in differ if len({repr(s[k]) for s in flat if k in s}) > 1]
    rows = [(key, *(str(settings.get(key, UNKNOWN)) for settings in flat)) for key in common]
    return table("What differs", ("", *(group.label for group in groups)), rows)


@dataclass(frozen=True)
class Panel:
    """A quantity of the lines of a phase; the phase `trained` is the serial one, if there is any.

    None is a line without the quantity.
    """

    quantity: str
    phase: str
    of: Callable[[Line], float | None]
    log: bool = False
    by_time: bool = True

    def points(self, record: Record) -> dict[int, float]:
        """Step -> value; a logarithmic axis has no place for 0."""
        phases = {line.phase for line in record.lines}
        phase = self.phase
        if phase == "trained":
            phase = "serial" if "serial" in phases else "parallel"
        own = [x for x in record.lines if phase in (x.phase, "any")]
        found = {x.step: value for x in own if (value := self.of(x)) is not None}
        return {x: y for x, y in found.items() if isfinite(y) and (y > 0 or not self.log)}


PANELS = {
    "Test accuracy": Panel("%", "test", lambda x: None if x.accuracy is None else 100 * x.accuracy),
    "Test loss": Panel("loss", "test", lambda x: x.loss),
    "Training loss": Panel("loss", "trained", lambda x: x.loss, log=True),
    "Learning rate": Panel("rate", "trained", lambda x: x.learning_rate, by_time=False),
    "Throughput of the phase that trains": Panel("images/s", "trained", Line.images_per_second),
    "Idle share of the rank that waits most": Panel(
        "waited, %", "any", lambda x: 100 * max(x.idle) if x.idle else None
    ),
    "Relative residual, mean over the cuts": Panel(
        "residual", "parallel", lambda x: mean(x.residual) if x.residual else None, log=True
    ),
}
EPOCHS, SECONDS, MINUTES = "epochs", "seconds of training", "minutes of training"
_SHORT = 300
"""Seconds of training up to which it is not told in minutes."""


def _curves(groups: Sequence[Group]) -> Iterable[Html]:
    """Each quantity by epochs and, unless it follows from them, by time."""
    lengths = [sum(line.seconds for line in r.lines) for group in groups for r in group.records]
    time = SECONDS if max(lengths) <= _SHORT else MINUTES
    for title, panel in PANELS.items():
        axes = (EPOCHS, time) if panel.by_time else (EPOCHS,)
        charts = {axis: _overlaid(groups, panel, axis) for axis in axes}
        drawn = [
            drawing(chart, f"{title} by {axis}", f"{title}, by {axis}")
            for axis, chart in charts.items()
            if not chart.empty
        ]
        if drawn:
            yield row(drawn)


def _overlaid(groups: Sequence[Group], panel: Panel, axis: str) -> Chart:
    """A curve for each group: the mean of its runs, and a band from the least to the greatest."""
    chart = Chart(axis, panel.quantity, log=panel.log)
    for group, color in zip(groups, cycle(SEVERAL), strict=False):
        series = [(_places(r, axis), points) for r in group.records if (points := panel.points(r))]
        common = sorted(set.intersection(*(set(points) for _, points in series))) if series else []
        if not common:
            continue
        xs = [mean(places[step] for places, _ in series) for step in common]
        ys = [[points[step] for _, points in series] for step in common]
        if len(series) > 1:
            chart.band(xs, [min(y) for y in ys], [max(y) for y in ys], color)
        chart.curve(xs, [mean(y) for y in ys], color, group.label)
    return chart


def _places(record: Record, axis: str) -> dict[int, float]:
    """Step -> epochs, or time of training, until then."""
    last = record.lines[-1]
    if axis == EPOCHS:
        per_step = last.epoch / last.step if last.step else 0.0
        return {line.step: line.step * per_step for line in record.lines}
    unit = 1 if axis == SECONDS else 60
    times = accumulate(line.seconds / unit for line in record.lines)
    return {line.step: until for line, until in zip(record.lines, times, strict=True)}
