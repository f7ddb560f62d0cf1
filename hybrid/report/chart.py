"""Charts in one style: plotly's figures, which zoom and show their values in the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BLUE, ORANGE, GREY = "#2b6ca3", "#d9822b", "#555555"
SEVERAL = (BLUE, ORANGE, "#3a9d6e", "#b5433f", "#7a4fa3", "#8a6a4f", "#cc6fa8", "#777777")
"""Colors of things that have no order; after the last, the first is used again."""
_HEIGHT = 350
_NAMED = 8
"""Of more ranks, cuts or blocks, the legend has only the first and the last."""
_MARKED, _MOST = 300, 2000
"""The most points that get a mark each, and the most that are drawn, evenly chosen."""


def chart(across: str, up: str, height: int = _HEIGHT, *, log: bool = False) -> Figure:
    """Empty axes with their names; ValueError where plotly is missing."""
    try:
        from plotly.graph_objects import Figure
    except ImportError:
        raise ValueError(
            "a report's charts need plotly: pip install 'hybrid-blocks[report]'"
        ) from None
    figure = Figure()
    figure.update_layout(
        template="simple_white",
        height=height,
        margin={"l": 60, "r": 15, "t": 62, "b": 45},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#222222"},
        # above the axes, where no curve can run through it, and below the buttons
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        hovermode="closest",
        hoverlabel={"namelength": -1},
    )
    figure.update_xaxes(title=across, showgrid=True, gridcolor="#e4e4e4")
    figure.update_yaxes(title=up, showgrid=True, gridcolor="#e4e4e4")
    if log:
        logarithmic(figure)
    return figure


def logarithmic(figure: Figure, ticks: Sequence[float] = ()) -> None:
    """A logarithmic y axis, with `ticks` or with few ticks of plotly's choice.

    A tick shows its value: plotly by itself writes 5 for 0.05, and within one decade it labels
    every digit, one over the other, unless it is asked for at most three.
    """
    figure.update_yaxes(type="log", tickformat="~g", nticks=3)
    if ticks:
        figure.update_yaxes(tickvals=list(ticks))


def curve(
    figure: Figure,
    xs: Sequence[float],
    ys: Sequence[float],
    color: str,
    label: str = "",
    *,
    legend: bool = True,
    width: float = 1.5,
    mode: str = "",
    **more: Any,
) -> None:
    """A line, with a mark for each point where they are few, as a single point has no line.

    A value that is not finite is a gap. `more` goes to the line: dash, shape.
    """
    each = -(-len(xs) // _MOST) or 1
    figure.add_scatter(
        x=list(xs[::each]),
        y=list(ys[::each]),
        mode=mode or ("lines+markers" if len(xs) <= _MARKED else "lines"),
        line={"color": color, "width": width, **more},
        marker={"size": 4, "color": color},
        name=escape(label),
        showlegend=legend and bool(label),
    )


def band(
    figure: Figure, xs: Sequence[float], low: Sequence[float], high: Sequence[float], color: str
) -> None:
    """The area between two curves, in a lighter shade."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    figure.add_scatter(
        x=[*xs, *reversed(xs)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=f"rgba({red}, {green}, {blue}, 0.18)",
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )


def in_order(kind: str, number: int, first: int = 0) -> Iterable[tuple[str, str, bool]]:
    """The color and name of each rank, cut or block, and whether the legend has it."""
    from plotly.colors import sample_colorscale

    places = [0.88 * i / max(1, number - 1) for i in range(number)]
    for i, color in enumerate(sample_colorscale("Viridis", places) if number else []):
        yield color, f"{kind} {i + first}", number <= _NAMED or i in (0, number - 1)
