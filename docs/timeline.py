"""What each rank did when: a row of bars for each rank, from the spans of their traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid.report.page import BLUE, GREEN, GREY, ORANGE, PURPLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "forward": BLUE,
    "backward": ORANGE,
    "local step": GREEN,
    "step": PURPLE,
    "wait": "#dddddd",
    "checkpoint": GREY,
    "evaluate": "#999999",
}
"""The beginning of a span's name -> its color; the later ones lie over the earlier ones."""
_AGES = 1e18
"""Microseconds beyond any time of day."""


class Span(NamedTuple):
    """A piece of a rank's work, in seconds."""

    rank: int
    thread: int
    name: str
    start: float
    end: float


def spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The spans of traces, each before those within it."""
    pieces = [
        Span(x["pid"], x["tid"], x["name"], x["ts"] / 1e6, (x["ts"] + x["dur"]) / 1e6)
        for x in events
        if x["ph"] == "X" and abs(x.get("ts", _AGES)) < _AGES and 0 <= x.get("dur", -1) < _AGES
    ]
    return sorted(pieces, key=lambda span: (span.rank, span.thread, span.start, -span.end))


def usual_period(pieces: Sequence[Span], steps: int) -> tuple[float, float] | None:
    """From when to when the first rank took so many steps, at the speed that was the usual one."""
    first = min((span.rank for span in pieces), default=0)
    ends = sorted(span.end for span in pieces if (span.rank, span.name) == (first, "step"))
    steps = min(steps, len(ends) - 1)
    if steps < 1:
        return None
    pairs = [pair for pair in zip(ends, ends[steps:], strict=False) if pair[0] < pair[1]]
    periods = sorted(pairs, key=lambda pair: pair[1] - pair[0])
    return periods[len(periods) // 2] if periods else None


def within(pieces: Sequence[Span], period: tuple[float, float]) -> list[Span]:
    """The spans that are drawn, as far as they are in a period."""
    start, stop = period
    kinds = tuple(COLORS)
    inside = (span for span in pieces if span.start < stop and span.end > start)
    return [
        span._replace(start=max(span.start, start), end=min(span.end, stop))
        for span in inside
        if span.name.startswith(kinds)
    ]


def draw(axes: Axes, shown: Sequence[Span], period: tuple[float, float]) -> list[str]:
    """A row for each rank, in milliseconds; the kinds of spans that there are."""
    from matplotlib.patches import PathPatch

    start, stop = period
    ranks = sorted({span.rank for span in shown})
    kinds = []
    for kind, color in COLORS.items():
        of_kind = [span for span in shown if span.name.startswith(kind)]
        if of_kind:
            kinds.append(kind)
            # one element of the page for all bars of a kind
            axes.add_patch(PathPatch(_bars(of_kind, ranks, start), facecolor=color, linewidth=0))
    axes.set_xlim(0, 1e3 * (stop - start))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.grid(visible=False)
    return kinds


def _bars(pieces: Sequence[Span], ranks: Sequence[int], start: float) -> Any:
    """A path of rectangles."""
    from matplotlib.path import Path as Outline

    rows = {rank: row for row, rank in enumerate(ranks)}
    corners = []
    for span in pieces:
        left, right = 1e3 * (span.start - start), 1e3 * (span.end - start)
        low, high = rows[span.rank] - 0.4, rows[span.rank] + 0.4
        corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
    turns = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
    return Outline(corners, turns * len(pieces))
