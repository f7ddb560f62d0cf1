"""The lines of metrics.jsonl as curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import isfinite, nan
from typing import TYPE_CHECKING

from hybrid.report.chart import BLUE, GREY, ORANGE, chart, curve, in_order, logarithmic
from hybrid.report.records import Line

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PHASES = {"serial": BLUE, "parallel": ORANGE, "test": GREY}


def curves(lines: Sequence[Line]) -> dict[str, Figure]:
    """Charts by title, of what the lines tell something of."""
    panels: dict[str, tuple[Callable[[Figure, Sequence[Line]], object], str]] = {
        "Loss of each phase, on training images": (_losses, "loss"),
        "Test accuracy": (_accuracy, "test accuracy, %"),
        "Relative primal residual ‖λ - x‖ / ‖x‖ at each cut": (_residuals, "relative residual"),
        "Primal and dual residual norms at each cut": (_norms, "norm"),
        "Learning rate": (_rates, "learning rate"),
        "Throughput": (_throughput, "images/s"),
        "Idle share of each rank": (_idle, "waited, %"),
        "Staleness: updates of a unit between an instance's forward and backward pass": (
            _staleness,
            "share of a block's gradients, %",
        ),
        "Rounds that follow residual and learning rate": (_rounds, "mini-batches, sweeps, rounds"),
        "Candidates that the sampler accepted": (_accepted, "accepted, %"),
    }
    made: dict[str, Figure] = {}
    for title, (draw, quantity) in panels.items():
        figure = chart("step", quantity)
        draw(figure, lines)
        if figure.data:
            made[title] = figure
    return made


def _losses(figure: Figure, lines: Sequence[Line]) -> None:
    _by_phase(figure, lines, lambda line: line.loss)


def _rates(figure: Figure, lines: Sequence[Line]) -> None:
    _by_phase(figure, lines, lambda line: line.learning_rate)


def _throughput(figure: Figure, lines: Sequence[Line]) -> None:
    trained = [line for line in lines if line.phase != "test"]
    _by_phase(figure, trained, Line.images_per_second)


def _idle(figure: Figure, lines: Sequence[Line]) -> None:
    own = [line for line in lines if line.idle]
    number = max((len(line.idle) for line in own), default=0)
    for rank, (color, label, named) in enumerate(in_order("rank", number)):
        points = [(line.step, 100 * line.idle[rank]) for line in own if rank < len(line.idle)]
        steps, values = zip(*points, strict=True)
        curve(figure, steps, values, color, label, legend=named)


def _by_phase(figure: Figure, lines: Sequence[Line], of: Callable[[Line], float | None]) -> None:
    for phase, color in _PHASES.items():
        found = [(x.step, of(x)) for x in lines if x.phase == phase]
        points = [(step, value) for step, value in found if value is not None and isfinite(value)]
        if points:
            steps, values = zip(*points, strict=True)
            curve(figure, steps, values, color, phase)


def _accuracy(figure: Figure, lines: Sequence[Line]) -> None:
    tested = [line for line in lines if line.phase == "test" and line.accuracy is not None]
    if tested:
        epochs, values = [x.epoch for x in tested], [100 * (x.accuracy or 0) for x in tested]
        curve(figure, epochs, values, BLUE)
        figure.update_xaxes(title="epoch")


def _staleness(figure: Figure, lines: Sequence[Line]) -> None:
    """A histogram a block, side by side."""
    own = [line.staleness for line in lines if line.staleness]
    number = max(map(len, own), default=0)
    for block, (color, label, named) in enumerate(in_order("block", number)):
        found = [each[block] for each in own if block < len(each)]
        sums = [sum(n) for n in zip_longest(*found, fillvalue=0)]
        shares = [100 * n / max(1, sum(sums)) for n in sums]
        figure.add_bar(
            x=[*range(len(sums))],
            y=shares,
            marker_color=color,
            name=label,
            showlegend=named,
        )
    figure.update_xaxes(title="updates")


def _residuals(figure: Figure, lines: Sequence[Line]) -> None:
    _cuts(figure, lines, lambda line: line.residual, "solid", named=True)


def _norms(figure: Figure, lines: Sequence[Line]) -> None:
    primal = _cuts(figure, lines, lambda line: line.primal, "solid", named=True)
    dual = _cuts(figure, lines, lambda line: line.dual, "dash", named=not primal)
    for dash, name in [("solid", "primal")] * primal + [("dash", "dual")] * dual:
        curve(figure, [nan], [nan], GREY, name, mode="lines", dash=dash)


def _rounds(figure: Figure, lines: Sequence[Line]) -> None:
    own = [line for line in lines if line.phase == "parallel" and line.window]
    for dash, name in [("solid", "window"), ("dash", "sweeps"), ("dot", "correct_every")]:
        steps, values = [x.step for x in own], [getattr(x, name) for x in own]
        if any(values):
            logarithmic(figure, [2**i for i in range(13)])
            label = name.replace("_", " ")
            curve(figure, steps, values, ORANGE, label, mode="lines", dash=dash, shape="vh")


def _accepted(figure: Figure, lines: Sequence[Line]) -> None:
    """Of all candidates of an epoch, and of those of each class."""
    own = [line for line in lines if line.phase == "sampler" and line.accepted is not None]
    steps = [line.step for line in own]
    number = max((len(x.accepted_by_class) for x in own), default=0)
    for each in range(number if number > 1 else 0):
        shares = [dict(enumerate(line.accepted_by_class)).get(each) for line in own]
        values = [nan if share is None else 100 * share for share in shares]
        label = f"class {each}" if each else "each class"
        curve(figure, steps, values, ORANGE, label, legend=not each, width=0.6)
    if own:
        values = [100 * (line.accepted or 0.0) for line in own]
        curve(figure, steps, values, BLUE, "all", width=2)


def _cuts(
    figure: Figure,
    lines: Sequence[Line],
    of: Callable[[Line], Sequence[float]],
    dash: str,
    named: bool,
) -> bool:
    """A curve a cut over the steps, as far as there are positive values."""
    own = [line for line in lines if line.phase == "parallel" and of(line)]
    number = max((len(of(line)) for line in own), default=0)
    drawn = False
    for cut, (color, label, few) in enumerate(in_order("cut", number, first=1)):
        points = [(line.step, of(line)[cut]) for line in own if cut < len(of(line))]
        steps, values = zip(*points, strict=True)
        shown = [value if isfinite(value) and value > 0 else nan for value in values]
        if not any(map(isfinite, shown)):
            continue
        drawn = True
        logarithmic(figure)
        curve(figure, steps, shown, color, label, legend=named and few, dash=dash)
    return drawn
