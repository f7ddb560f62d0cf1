"""What each rank did when: a few steps at first, more by zooming out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, ValidationError

from hybrid.folder.runfolder import MOST_BYTES
from hybrid.reading import read_whole
from hybrid.report.chart import chart

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS = {
    "forward": "#2b6ca3",
    "backward": "#d9822b",
    "local step": "#3a9d6e",
    "step": "#7a4fa3",
    "wait": "#dddddd",
    "checkpoint": "#555555",
    "evaluate": "#999999",
}
"""What is drawn; the later ones over the earlier ones."""
_MOST_RANKS = 64
_MOST_SPANS = 6000
_SHOWN = 4
"""Steps of the first rank that are in sight at first."""


class Span(BaseModel):
    """A complete event of a trace, in microseconds."""

    name: str
    pid: int = Field(ge=0, lt=2**31)
    ts: float = Field(ge=0, lt=1e18)
    dur: float = Field(ge=0, lt=1e15)
    args: dict[str, object] = {}
    """Step and micro-batch, where it has them."""

    @property
    def kind(self) -> str:
        """What it is drawn as."""
        return "wait" if self.name.startswith("wait") else self.name


@dataclass(frozen=True)
class Stretch:
    """Spans that can be drawn, in order; `start` and `stop`, in microseconds: those in sight."""

    spans: list[Span]
    ranks: list[int]
    start: float
    stop: float


def spans(file: Path) -> list[Span]:
    """Those of a trace that can be drawn; none of one that cannot be read."""
    try:
        events = json.loads(read_whole(file, MOST_BYTES))["traceEvents"]
        complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
        return [Span.model_validate(event) for event in complete]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return []


def stretch(found: Sequence[Span], steps: int = _SHOWN) -> Stretch | None:
    """So many steps of the first rank, some time after its first one; None if there are none."""
    ends = sorted(s.ts + s.dur for s in found if s.pid == 0 and s.name == "step")
    if len(ends) < 2:
        return None
    first = min(len(ends) // 4, max(0, len(ends) - 1 - steps))
    start, stop = ends[first], ends[min(first + steps, len(ends) - 1)]
    drawn = sorted((s for s in found if s.kind in COLORS), key=lambda s: s.ts)
    seen = [s for s in drawn if s.ts < stop and s.ts + s.dur > start]
    if len(seen) > _MOST_SPANS:  # less time, so that what is in sight is whole
        stop = max(seen[_MOST_SPANS - 1].ts, start + 1)
    return Stretch(drawn, sorted({s.pid for s in seen})[:_MOST_RANKS], start, stop)


def timeline(found: Sequence[Span]) -> Figure | None:
    """A row a rank, a bar a span, in ms; None if there is nothing to draw."""
    part = stretch(found)
    if part is None:
        return None
    figure = chart("ms", "", height=130 + 32 * len(part.ranks))
    near = _near(part)
    for kind, color in COLORS.items():
        bars = [s for s in near if s.kind == kind]
        if bars:
            figure.add_bar(
                orientation="h",
                y=[f"rank {s.pid}" for s in bars],
                base=[(s.ts - part.start) / 1e3 for s in bars],
                x=[s.dur / 1e3 for s in bars],
                marker={"color": color, "line": {"width": 0}},
                name=kind,
                customdata=[_about(s) for s in bars],
                hovertemplate="%{customdata}<extra></extra>",
            )
    figure.update_layout(barmode="overlay", dragmode="pan", bargap=0.2, legend_entrywidth=70)
    figure.update_xaxes(range=[0, (part.stop - part.start) / 1e3], showgrid=False)
    names = [f"rank {rank}" for rank in part.ranks]
    figure.update_yaxes(
        autorange="reversed",
        fixedrange=True,
        showgrid=False,
        categoryarray=names,
        categoryorder="array",
    )
    return figure


def _near(part: Stretch) -> list[Span]:
    """The spans in sight, and of the others those nearest to them, while there is room."""
    rows, middle = set(part.ranks), (part.start + part.stop) / 2

    def away(span: Span) -> float:
        """0 in sight."""
        return max(0.0, part.start - span.ts - span.dur, span.ts - part.stop)

    own = [span for span in part.spans if span.pid in rows]
    return sorted(own, key=lambda s: (away(s), abs(s.ts - middle)))[:_MOST_SPANS]


def _about(span: Span) -> str:
    where = [f"{key.replace('_', '-')} {number}" for key, number in span.args.items()]
    return escape(f"{', '.join([span.kind, *where])}: {span.dur / 1e3:.3f} ms")
