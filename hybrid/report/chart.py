"""Charts in one style, drawn by matplotlib as SVG, which needs no script in the page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6ca3", "#d9822b", "#3a9d6e", "#7a4fa3", "#555555"
SEVERAL = (BLUE, ORANGE, GREEN, "#b5433f", PURPLE, "#8a6a4f", "#cc6fa8", "#777777")
"""Colors of things that have no order; after the last, the first is used again."""
_WIDTH, _HEIGHT = 6.4, 2.9
"""Inches of 72 points."""
_NAMED = 8
"""Of more ranks, cuts or blocks, the legend has only the first and the last."""
_MARKED, _MOST = 60, 500
"""The most points that get a mark each, and the most that are drawn, evenly chosen."""
_LARGEST = 1e100
"""Of the values that are drawn: a distance of two must be finite, too."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hybrid",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
}


class Key(NamedTuple):
    """An entry of a legend, which the page shows above the chart."""

    color: str
    dash: str
    label: str


class Chart:
    """Axes with their names, and what is drawn on them; ValueError where matplotlib is missing."""

    def __init__(
        self,
        across: str,
        up: str,
        *,
        log: bool = False,
        width: float = _WIDTH,
        height: float = _HEIGHT,
    ) -> None:
        with _style():
            from matplotlib.figure import Figure

            self.figure = Figure((width, height), layout="constrained")
            self.axes: Axes = self.figure.subplots()
        self.axes.set_xlabel(across)
        self.axes.set_ylabel(up)
        self.keys: list[Key] = []
        self.log = log

    @property
    def empty(self) -> bool:
        """Whether nothing is drawn."""
        return not self.axes.has_data()

    def logarithmic(self) -> None:
        """Make the y axis logarithmic."""
        self.log = True

    def curve(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        color: str,
        label: str = "",
        *,
        lines: bool = True,
        dash: str = "solid",
        width: float = 1.5,
        most: int = _MOST,
    ) -> None:
        """A line, with a mark for each point where they are few, as a single point has no line.

        A value that is huge or not finite is a gap; without `lines` there are marks alone. At most
        so many points are drawn. Without a label the legend has no entry.
        """
        each = -(-len(xs) // most) or 1
        self.axes.plot(
            list(xs[::each]),
            [y if abs(y) < _LARGEST else nan for y in ys[::each]],
            color=color,
            linewidth=width,
            linestyle=dash if lines else "none",
            marker="o" if not lines or len(xs) <= _MARKED else "",
            markersize=3,
        )
        self._name(color, dash, label)

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], color: str
    ) -> None:
        """The area between two curves, in a lighter shade."""
        each = -(-len(xs) // _MOST) or 1
        self.axes.fill_between(
            xs[::each], low[::each], high[::each], color=color, alpha=0.18, linewidth=0
        )

    def bars(
        self, xs: Sequence[float], heights: Sequence[float], color: str, label: str, part: float
    ) -> None:
        """Bars from each x on, as wide as a `part` of the distance between two."""
        self.axes.bar(xs, heights, part, align="edge", color=color)
        self._name(color, "solid", label)

    def svg(self) -> str:
        """The chart as an element of a page: without prolog, ids and digits that nobody sees."""
        buffer = StringIO()
        with _style(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of limits that are equal, of letters without a form
            self._set_ticks()
            nobody = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.figure.savefig(buffer, format="svg", metadata=nobody)
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace("\n", " ")
        text = re.sub(r'<g id="[^"]*">', "<g>", text)
        shorter = re.sub(r"<metadata>.*?</metadata>", "", text)
        return re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), shorter)

    def _name(self, color: str, dash: str, label: str) -> None:
        if label:
            self.keys.append(Key(color, dash, label))

    def _set_ticks(self) -> None:
        """Few ticks, each of which tells its value."""
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

        x, y = self.axes.xaxis, self.axes.yaxis
        plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
        for axis in (x, y):
            if isinstance(axis.get_major_locator(), FixedLocator):
                continue  # categories
            low, high = axis.get_view_interval()
            most = 7 if axis is x else 5
            axis.set_major_locator(MaxNLocator(most, integer=axis is x and high - low > 2))
            axis.set_major_formatter(plain)
        if self.log and isfinite(self.axes.dataLim.minposy):
            self.axes.set_yscale("log", nonpositive="mask")
            low, high = self.axes.get_ylim()
            decades = high / low if isfinite(high) and low > 0 else 10.0
            if decades < 10:
                y.set_major_locator(MaxNLocator(4))
            else:
                y.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 300 else (1,)))
            y.set_major_formatter(plain)
            y.set_minor_locator(FixedLocator([]))


def in_order(kind: str, number: int, first: int = 0) -> Iterable[tuple[str, str, bool]]:
    """The color and name of each rank, cut or block, and whether the legend has it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colors = colormaps["viridis"]
    for i in range(number):
        color = to_hex(colors(0.88 * i / max(1, number - 1)))
        yield color, f"{kind} {i + first}", number <= _NAMED or i in (0, number - 1)


@contextmanager
def _style() -> Iterator[None]:
    """This style, whatever a user's own configuration of matplotlib is."""
    try:
        from matplotlib import style
    except ImportError:
        raise ValueError(
            "a report's charts need matplotlib: pip install 'hybrid-blocks[report]'"
        ) from None
    wanted: list[Any] = ["default", _STYLE]
    with style.context(wanted):
        yield
