"""A self-contained HTML page of tables and charts: nothing is fetched, and no script runs.

The markup is in the macros of page.html, which escape every text. Charts are drawn by matplotlib,
as SVG within the page.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import StringIO
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

N = TypeVar("N", int, float)
Html = Markup
"""A plain string is text and gets escaped on its way here."""
UNKNOWN = "-"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6ca3", "#d9822b", "#3a9d6e", "#7a4fa3", "#555555"
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#000000", "#e69f00", "#56b4e9", "#8a8a8a"),
)
"""Colors of curves, distinguishable by the color-blind; they repeat after the last."""
_MARKED, _MOST = 60, 500
"""The most points with a marker each, and the most points drawn, evenly chosen."""
LARGEST = 1e18
"""The largest value drawn, so that differences of values stay finite."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hybrid",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
}


class Chart:
    """Axes with curves.

    With `log` the y axis is logarithmic if all values are positive and span a power of 10.
    """

    def __init__(self, across: str, up: str, *, log: bool = False) -> None:
        with plain_style():
            from matplotlib.figure import Figure

            self.figure = Figure((6.4, 2.9), layout="constrained")
            self.axes: Axes = self.figure.subplots()
        self.axes.set_xlabel(across)
        self.axes.set_ylabel(up)
        self.keys: list[tuple[str, str]] = []
        """Color and label of each entry of the legend, which the page shows above the chart."""
        self.log = log

    @property
    def empty(self) -> bool:
        return not self.axes.has_data()

    def curve(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        color: str,
        label: str = "",
        *,
        lines: bool = True,
    ) -> None:
        """Draw a line, with a marker for each point if there are few; without `lines`, markers.

        A value that is huge or not finite is a gap. Without a label the legend has no entry.
        """
        self.axes.plot(
            *([x if abs(x) < LARGEST else nan for x in _thinned(values)] for values in (xs, ys)),
            color=color,
            linestyle="solid" if lines else "none",
            marker="o" if not lines or len(xs) <= _MARKED else "",
            markersize=3,
        )
        if label:
            self.keys.append((color, label))

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], color: str
    ) -> None:
        """Fill the area between two curves in a lighter shade."""
        low, high = _thinned(low), _thinned(high)
        self.axes.fill_between(_thinned(xs), low, high, color=color, alpha=0.18, linewidth=0)

    def svg(self) -> str:
        """Render the chart as an SVG element, without ids and invisible digits."""
        buffer = StringIO()
        with plain_style(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about equal limits, or missing glyphs
            self._set_ticks()
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
        text = re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :])
        return re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), text)

    def _set_ticks(self) -> None:
        """Use plain numbers, integers on the x axis, and 1, 2, 5 between few powers of 10."""
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

        axes, low, high = self.axes, float(self.axes.dataLim.ymin), float(self.axes.dataLim.ymax)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))
        if self.log and 0 < 10 * low <= high:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def plain(value: float) -> str:
    """Format a number, with an exponent only if it would be long."""
    if value == 0 or 1e-6 <= abs(value) < 1e9:
        return f"{value:,.7f}".rstrip("0").rstrip(".")
    return f"{value:g}"


def _thinned(values: Sequence[N]) -> Sequence[N]:
    """Choose at most `_MOST` values evenly."""
    return values[:: -(-len(values) // _MOST) or 1]


@contextmanager
def plain_style() -> Iterator[None]:
    """Use this style in the body, whatever the user's matplotlib configuration is."""
    from matplotlib import style

    styles: list[Any] = ["default", _STYLE]
    with style.context(styles):
        yield


@cache
def _macros() -> Any:
    from jinja2 import Environment, FileSystemLoader  # not needed in training

    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").module


def heading(title: str) -> Html:
    """Make a heading."""
    return Html(_macros().heading(title))


def note(sentence: str) -> Html:
    """Make a highlighted paragraph."""
    return Html(_macros().note(sentence))


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Make a table with row names in the first column; an empty header is left out."""
    return Html(_macros().table(caption, header, [(first, rest) for first, *rest in rows]))


def drawing(chart: Chart, title: str) -> Html:
    """Make a chart with its title above it."""
    return Html(_macros().drawing(Html(chart.svg()), chart.keys, title))


def row(parts: Iterable[Html]) -> Html:
    """Put parts side by side, as many as fit."""
    return Html(_macros().row([*parts]))


def page(title: str, parts: Iterable[Html]) -> bytes:
    """Make the whole document."""
    document = _macros().page(title, [*parts]).strip() + "\n"
    # a JSON file may hold a lone surrogate, which UTF-8 cannot encode
    return str(document).encode(errors="xmlcharrefreplace")


def amount(size: float | None) -> str:
    """Format a number of bytes with three digits and a unit."""
    if size is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
