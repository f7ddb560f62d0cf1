"""Several runs beside each other: those that differ in their seed alone are one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isfinite
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING, Any

from hybrid.report.chart import SEVERAL, band, chart, curve
from hybrid.report.page import Html, drawing, heading, page, paragraph, row, table
from hybrid.report.records import Line, Record, read
from hybrid.report.tables import UNKNOWN, amount
from hybrid.report.timeline import spans, timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SEED = "train.seed"
_PLACES = ("data.dir",)
"""Settings that say where, and not what."""
Points = list[tuple[float, float]]


@dataclass
class Group:
    """Runs that differ in their seed alone."""

    label: str
    records: list[Record]

    def values(self, name: str) -> list[float]:
        """Of each run that has it: a number of its summary."""
        found = [getattr(record.summary, name) for record in self.records]
        return [float(max(x) if isinstance(x, list) else x) for x in found if x not in (None, [])]

    @property
    def epochs(self) -> str:
        """Those after which its runs were tested last."""
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
    drawn = [(group.label, _timeline(group)) for group in groups]
    shown = [drawing(figure, label, label) for label, figure in drawn if figure is not None]
    if shown:
        parts += [heading(2, "What each rank did when, in a few steps"), *shown]
    return page(f"{len(records)} runs compared", parts)


def _flat(record: Record) -> dict[str, Any]:
    """Settings by "section.key"; of a run of the library, what its summary tells."""
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
        # what tells it from another of the same method
        same = [flat[i] for i in range(len(flat)) if flat[i].get("solver.name") == name]
        own = [k for k in differ if len({repr(s.get(k)) for s in same}) > 1]
        more = [f"{key.partition('.')[2]} {settings[key]}" for key in own if key in settings]
        groups.append(Group(", ".join([name, *more]), [records[i] for i in numbers]))
    return groups


def _overview(groups: Sequence[Group]) -> Html:
    """A row a group, with its difference in accuracy to the first one."""

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
    """Points of accuracy over another group's, and why they may say nothing of the method."""
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
    """The mean and, of several, the standard deviation."""
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


def _minutes(lines: Sequence[Line]) -> dict[int, float]:
    """Step -> minutes of training until then."""
    total, found = 0.0, {0: 0.0}
    for line in lines:
        total += line.seconds
        found[line.step] = total / 60
    return found


def _tested(of: Callable[[Line], float | None]) -> Callable[[Record], Points]:
    def points(record: Record) -> Points:
        own = [line for line in record.lines if line.phase == "test"]
        return [(x.step, value) for x in own if (value := of(x)) is not None]

    return points


def _trained(of: Callable[[Line], float | None]) -> Callable[[Record], Points]:
    """Of the serial phase where there is one, else of the parallel one."""

    def points(record: Record) -> Points:
        kinds = {line.phase for line in record.lines}
        phase = "serial" if "serial" in kinds else "parallel"
        own = [line for line in record.lines if line.phase == phase]
        return [(x.step, value) for x in own if (value := of(x)) is not None]

    return points


def _residual(record: Record) -> Points:
    own = [line for line in record.lines if line.phase == "parallel" and line.residual]
    return [(line.step, mean(line.residual)) for line in own]


def _idle(record: Record) -> Points:
    return [(line.step, 100 * max(line.idle)) for line in record.lines if line.idle]


def _windows(record: Record) -> Points:
    return [(line.step, float(line.window)) for line in record.lines if line.window]


PANELS: tuple[tuple[str, str, Callable[[Record], Points], bool], ...] = (
    (
        "Test accuracy",
        "%",
        _tested(lambda x: None if x.accuracy is None else 100 * x.accuracy),
        False,
    ),
    ("Test loss", "loss", _tested(lambda x: x.loss), False),
    ("Training loss", "loss", _trained(lambda x: x.loss), True),
    ("Learning rate", "rate", _trained(lambda x: x.learning_rate), False),
    ("Throughput of the phase that trains", "images/s", _trained(Line.images_per_second), False),
    ("Idle share of the rank that waits most", "waited, %", _idle, False),
    ("Relative residual, mean over the cuts", "residual", _residual, True),
    ("Window", "mini-batches", _windows, False),
)
"""Title, quantity, (step, value) of a run, whether the axis is logarithmic."""


def _curves(groups: Sequence[Group]) -> Iterable[Html]:
    """Each quantity by epochs and, of what is tested, by time."""
    for title, quantity, of, log in PANELS:
        axes = [("epochs", _by_epoch), ("minutes of training", _by_minutes)]
        figures = [_overlaid(groups, quantity, of, log, name, place) for name, place in axes]
        pictures = [
            drawing(figure, f"{title} by {name}", f"{title}, by {name}")
            for figure, (name, _) in zip(figures, axes, strict=True)
            if figure is not None
        ]
        if pictures:
            yield row(pictures)


def _by_epoch(record: Record, step: float) -> float:
    last = record.lines[-1]
    return step * last.epoch / last.step if last.step else 0.0


def _by_minutes(record: Record, step: float) -> float:
    return _minutes(record.lines).get(int(step), 0.0)


def _overlaid(
    groups: Sequence[Group],
    quantity: str,
    of: Callable[[Record], Points],
    log: bool,
    name: str,
    place: Callable[[Record, float], float],
) -> Figure | None:
    """A curve a group: the mean of its runs, and between the least and the most a band."""
    figure = chart(name, quantity, log=log)
    for group, color in zip(groups, cycle(SEVERAL), strict=False):
        # a logarithmic axis has no place for 0
        series = [
            {x: (place(r, x), y) for x, y in of(r) if isfinite(y) and (y > 0 or not log)}
            for r in group.records
        ]
        series = [points for points in series if points]
        common = sorted(set.intersection(*map(set, series))) if series else []
        if not common:
            continue
        xs = [mean(points[x][0] for points in series) for x in common]
        ys = [[points[x][1] for points in series] for x in common]
        if len(series) > 1:
            band(figure, xs, [min(y) for y in ys], [max(y) for y in ys], color)
        curve(figure, xs, [mean(y) for y in ys], color, group.label)
    return figure if figure.data else None


def _timeline(group: Group) -> Figure | None:
    return timeline(spans(group.records[0].run / "trace.json"))
