"""The lines of metrics.jsonl as curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from math import isfinite, nan

from hybrid.report.chart import BLUE, GREY, ORANGE, Chart, Key, in_order
from hybrid.report.records import Line

Draw = Callable[[Chart, Sequence[Line]], object]
_CURVES = 64
"""The most ranks, or cuts, that have a curve, beside the last one."""
_PHASES = {"serial": BLUE, "parallel": ORANGE, "test": GREY}


def curves(lines: Sequence[Line]) -> dict[str, Chart]:
    """Charts by title, without those for which the lines have no values."""
    made: dict[str, Chart] = {}
    for title, (quantity, draw) in PANELS.items():
        chart = Chart("step", quantity)
        draw(chart, lines)
        if not chart.empty:
            made[title] = chart
    return made


def _by_phase(of: Callable[[Line], float | None], chart: Chart, lines: Sequence[Line]) -> None:
    """A curve for each phase that has values."""
    for phase, color in _PHASES.items():
        found = [(x.step, of(x)) for x in lines if x.phase == phase]
        points = [(step, value) for step, value in found if value is not None and isfinite(value)]
        if points:
            steps, values = zip(*points, strict=True)
            chart.curve(steps, values, color, phase)


def _by_rank(chart: Chart, lines: Sequence[Line]) -> None:
    own = [(line.step, [100 * share for share in line.idle]) for line in lines if line.idle]
    _by_number("rank", own, chart)


def _by_cut(
    name: str, chart: Chart, lines: Sequence[Line], legend: bool = True, dash: str = "solid"
) -> bool:
    """A curve for each cut, as far as the field is positive; whether there are any."""
    own = [(x.step, getattr(x, name)) for x in lines if x.phase == "parallel"]
    shown = [(step, [v if isfinite(v) and v > 0 else nan for v in vs]) for step, vs in own]
    if not any(isfinite(value) for _, values in shown for value in values):
        return False
    chart.logarithmic()
    _by_number("cut", shown, chart, first=1, legend=legend, dash=dash)
    return True


def _by_number(
    kind: str,
    found: Sequence[tuple[int, Sequence[float]]],
    chart: Chart,
    first: int = 0,
    legend: bool = True,
    dash: str = "solid",
) -> None:
    """A curve for each place in the lists of values; of very many for some, evenly chosen."""
    number = max((len(values) for _, values in found), default=0)
    each = -(-number // _CURVES) or 1
    most = max(60, 4000 // max(1, number))
    for place, (color, label, few) in enumerate(in_order(kind, number, first)):
        if place % each and place != number - 1:
            continue
        points = [(step, values[place]) for step, values in found if place < len(values)]
        steps, ys = zip(*points, strict=True)
        chart.curve(steps, ys, color, label if legend and few else "", dash=dash, most=most)


def _norms(chart: Chart, lines: Sequence[Line]) -> None:
    primal = _by_cut("primal", chart, lines)
    dual = _by_cut("dual", chart, lines, legend=not primal, dash="dashed")
    for dash, name in [("solid", "primal")] * primal + [("dashed", "dual")] * dual:
        chart.keys.append(Key(GREY, dash, name))


def _staleness(chart: Chart, lines: Sequence[Line]) -> None:
    """A histogram for each block, side by side."""
    own = [line.staleness for line in lines if line.staleness]
    number = max(map(len, own), default=0)
    for block, (color, label, legend) in enumerate(in_order("block", number)):
        found = [each[block] for each in own if block < len(each)]
        sums = [sum(n) for n in zip_longest(*found, fillvalue=0)]
        shares = [100 * n / max(1, sum(sums)) for n in sums]
        part = 0.8 / number
        places = [x - 0.4 + block * part for x in range(len(sums))]
        chart.bars(places, shares, color, label if legend else "", part)
    chart.axes.set_xlabel("updates")


def _accepted(chart: Chart, lines: Sequence[Line]) -> None:
    """Of all candidates of an epoch."""
    own = [line for line in lines if line.phase == "sampler" and line.accepted is not None]
    steps = [line.step for line in own]
    if own:
        chart.curve(steps, [100 * (line.accepted or 0.0) for line in own], BLUE, "all", width=2)


def _test_accuracy(line: Line) -> float | None:
    return 100 * line.accuracy if line.phase == "test" and line.accuracy is not None else None


def _images(line: Line) -> float | None:
    return None if line.phase == "test" else line.images_per_second()


PANELS: dict[str, tuple[str, Draw]] = {
    "Loss of each phase, on training images": ("loss", partial(_by_phase, lambda x: x.loss)),
    "Test accuracy": ("test accuracy, %", partial(_by_phase, _test_accuracy)),
    "Relative primal residual ‖λ - x‖ / ‖x‖ at each cut": (
        "relative residual",
        partial(_by_cut, "residual"),
    ),
    "Primal and dual residual norms at each cut": ("norm", _norms),
    "Learning rate": ("learning rate", partial(_by_phase, lambda x: x.learning_rate)),
    "Throughput": ("images/s", partial(_by_phase, _images)),
    "Idle share of each rank": ("waited, %", _by_rank),
    "Staleness: updates of a unit between an instance's forward and backward pass": (
        "share of a block's gradients, %",
        _staleness,
    ),
    "Candidates that the sampler accepted": ("accepted, %", _accepted),
}
"""Title -> the quantity upwards, and what draws it."""
