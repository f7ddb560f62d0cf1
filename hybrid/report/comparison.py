"""Several runs beside each other: runs that differ only in their seed share a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from math import isfinite
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING, Any

from hybrid.report.chart import SEVERAL, band, chart, curve
from hybrid.report.page import Html, drawing, heading, page, paragraph, row, table
from hybrid.report.records import Line, Record, read
from hybrid.report.tables import UNKNOWN, amount

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SEED = "train.seed"
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
    """Settings by "section.key"; those of a library run come from its summary."""
    if record.settings is None:
        told = record.summary
        return {"model.name": told.model, "solver.name": told.solver, "split.blocks": told.blocks}
    tree = record.settings.model_dump()
    flat = {f"{section}.{key}": v for section, table in tree.items() for key, v in table.items()}
    return {key: value for key, value in flat.items() if key not in _PLACES}


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
        more = [f"{key.partition('.')[2]} {settings[key]}" for key in own if key in settings]
        groups.append(Group(", ".join([name, *more]), [records[i] for i in numbers]))
    return groups


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

    header = ("", "runs", "test accuracy", "points", "test loss", "training", "images/s")
    rows = [cells(group) for group in groups]
    return table("Runs", (*header, "idle, most", "peak memory"), rows)


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
    return " ± ".join(format(x, form) for x in told).replace(" ", "\N{NO-BREAK SPACE}") + unit


def _settings(groups: Sequence[Group], differ: Sequence[str]) -> Html:
    flat = [_flat(group.records[0]) for group in groups]
    rows = [(key, *(str(settings.get(key, UNKNOWN)) for settings in flat)) for key in differ]
    if not rows:
        return paragraph("The runs have the same settings, but for their seeds.")
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
    "Learning rate": Panel("rate", "trained", lambda x: x.learning_rate),
    "Throughput of the phase that trains": Panel("images/s", "trained", Line.images_per_second),
    "Idle share of the rank that waits most": Panel(
        "waited, %", "any", lambda x: 100 * max(x.idle) if x.idle else None
    ),
    "Relative residual, mean over the cuts": Panel(
        "residual", "parallel", lambda x: mean(x.residual) if x.residual else None, log=True
    ),
    "Window": Panel("mini-batches", "any", lambda x: float(x.window) if x.window else None),
}
AXES = ("epochs", "minutes of training")


def _curves(groups: Sequence[Group]) -> Iterable[Html]:
    """Each quantity by epochs and by time."""
    for title, panel in PANELS.items():
        figures = [_overlaid(groups, panel, axis) for axis in AXES]
        yield row(
            drawing(figure, f"{title} by {axis}", f"{title}, by {axis}")
            for figure, axis in zip(figures, AXES, strict=True)
            if figure.data
        )


def _overlaid(groups: Sequence[Group], panel: Panel, axis: str) -> Figure:
    """A curve for each group: the mean of its runs, and a band from the least to the greatest."""
    figure = chart(axis, panel.quantity, log=panel.log)
    for group, color in zip(groups, cycle(SEVERAL), strict=False):
        series = [(_places(r, axis), points) for r in group.records if (points := panel.points(r))]
        common = sorted(set.intersection(*(set(points) for _, points in series))) if series else []
        if not common:
            continue
        xs = [mean(places[step] for places, _ in series) for step in common]
        ys = [[points[step] for _, points in series] for step in common]
        if len(series) > 1:
            band(figure, xs, [min(y) for y in ys], [max(y) for y in ys], color)
        curve(figure, xs, [mean(y) for y in ys], color, group.label)
    return figure


def _places(record: Record, axis: str) -> dict[int, float]:
    """Step -> epochs, or minutes of training, until then."""
    last = record.lines[-1]
    if axis == "epochs":
        per_step = last.epoch / last.step if last.step else 0.0
        return {line.step: line.step * per_step for line in record.lines}
    minutes = accumulate(line.seconds / 60 for line in record.lines)
    return {line.step: until for line, until in zip(record.lines, minutes, strict=True)}
