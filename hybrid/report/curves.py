"""The lines of metrics.jsonl as curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import zip_longest
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from hybrid.report.records import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {"serial": "#2b6ca3", "parallel": "#d9822b"}
_GREY = "#555555"
_MARKED: dict[str, Any] = {"marker": ".", "markersize": 3}
"""A single point has no line."""
_NAMED = 8
"""With more cuts than this only the first and the last are named; the colours go from one to the
other."""


def curves(lines: Sequence[Line]) -> dict[str, bytes]:
    """PNG pictures by title, of what the lines tell something of."""
    from matplotlib.figure import Figure

    panels: dict[str, tuple[Callable[[Axes, Sequence[Line]], object], str]] = {
        "Loss of each phase, on training images": (_losses, "loss"),
        "Test accuracy": (_accuracy, "test accuracy, %"),
        "Relative primal residual ‖λ - x‖ / ‖x‖ at each cut": (
            lambda axes, lines: _cuts(axes, lines, lambda line: line.residual, "-", named=True),
            "relative residual",
        ),
        "Primal and dual residual norms at each cut": (_norms, "norm"),
        "Staleness: updates of a unit between an instance's forward and backward pass": (
            _staleness,
            "share of a block's gradients, %",
        ),
        "Rounds that follow residual and learning rate": (_rounds, "mini-batches, sweeps, rounds"),
        "Candidates that the sampler accepted": (_accepted, "accepted, %"),
    }
    made: dict[str, bytes] = {}
    for title, (draw, quantity) in panels.items():
        figure = Figure(figsize=(5.6, 3.3), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel("step")
        axes.set_ylabel(quantity)
        draw(axes, lines)
        if axes.has_data():
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                # above the axes, where no curve can run through it
                axes.legend(frameon=False, fontsize="small", ncols=5, loc=(0, 1.02))
            made[title] = png(figure)
    return made


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _losses(axes: Axes, lines: Sequence[Line]) -> None:
    for phase, colour in [*_PHASES.items(), ("test", _GREY)]:
        own = [x for x in lines if x.phase == phase and x.loss is not None and isfinite(x.loss)]
        if own:
            steps, losses = [x.step for x in own], [x.loss or 0 for x in own]
            axes.plot(steps, losses, color=colour, label=phase, **_MARKED)


def _accuracy(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    tested = [line for line in lines if line.phase == "test" and line.accuracy is not None]
    if tested:
        epochs, values = [x.epoch for x in tested], [100 * (x.accuracy or 0) for x in tested]
        axes.plot(epochs, values, color=_PHASES["serial"], **_MARKED)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _staleness(axes: Axes, lines: Sequence[Line]) -> None:
    """A histogram a block, side by side."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    own = [line.staleness for line in lines if line.staleness]
    number = max(map(len, own), default=0)
    for block in range(number):
        found = [each[block] for each in own if block < len(each)]
        sums = [sum(n) for n in zip_longest(*found, fillvalue=0)]
        shares = [100 * n / max(1, sum(sums)) for n in sums]
        places = [late + 0.8 * ((block + 0.5) / number - 0.5) for late in range(len(sums))]
        name = number <= _NAMED or block in (0, number - 1)
        label = f"block {block}" if name else "_"
        colour = colormaps["viridis"](0.88 * block / max(1, number - 1))
        axes.bar(places, shares, 0.8 / number, color=colour, label=label)
    if number:
        axes.set_xlabel("updates")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _norms(axes: Axes, lines: Sequence[Line]) -> None:
    primal = _cuts(axes, lines, lambda line: line.primal, "-", named=True)
    dual = _cuts(axes, lines, lambda line: line.dual, "--", named=not primal)
    for style, name in [("-", "primal")] * primal + [("--", "dual")] * dual:
        axes.plot([], [], color=_GREY, linestyle=style, label=name)


def _rounds(axes: Axes, lines: Sequence[Line]) -> None:
    own = [line for line in lines if line.phase == "parallel" and line.window]
    for style, name in [("-", "window"), ("--", "sweeps"), (":", "correct_every")]:
        steps, values = [x.step for x in own], [getattr(x, name) for x in own]
        if any(values):
            axes.set_yscale("log", base=2)
            label, colour = name.replace("_", " "), _PHASES["parallel"]
            axes.plot(steps, values, style, color=colour, label=label, drawstyle="steps-pre")


def _accepted(axes: Axes, lines: Sequence[Line]) -> None:
    """Of all candidates of an epoch, and of those of each class."""
    own = [line for line in lines if line.phase == "sampler" and line.accepted is not None]
    steps, number = (
        [line.step for line in own],
        max((len(x.accepted_by_class) for x in own), default=0),
    )
    for each in range(number if number > 1 else 0):
        shares = [dict(enumerate(line.accepted_by_class)).get(each) for line in own]
        values = [nan if share is None else 100 * share for share in shares]
        label = "_" if each else "each class"
        axes.plot(steps, values, color=_PHASES["parallel"], linewidth=0.6, label=label, **_MARKED)
    if own:
        values = [100 * (line.accepted or 0.0) for line in own]
        axes.plot(steps, values, color=_PHASES["serial"], linewidth=2, label="all", **_MARKED)


def _cuts(
    axes: Axes,
    lines: Sequence[Line],
    of: Callable[[Line], Sequence[float]],
    style: str,
    named: bool,
) -> bool:
    """A curve a cut over the steps, as far as there are positive values."""
    from matplotlib import colormaps

    own = [line for line in lines if line.phase == "parallel" and of(line)]
    number = max((len(of(line)) for line in own), default=0)
    drawn = False
    for cut in range(number):
        points = [(line.step, of(line)[cut]) for line in own if cut < len(of(line))]
        steps, values = zip(*points, strict=True)
        shown = [value if isfinite(value) and value > 0 else nan for value in values]
        if not any(map(isfinite, shown)):
            continue
        drawn = True
        axes.set_yscale("log")
        name = named and (number <= _NAMED or cut in (0, number - 1))
        label = f"cut {cut + 1}" if name else "_"
        colour = colormaps["viridis"](0.88 * cut / max(1, number - 1))
        axes.plot(steps, shown, style, color=colour, label=label, **_MARKED)
    return drawn
