"""What each rank did when, as a picture of a few rounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, ValidationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#2b6ca3",
    "backward": "#d9822b",
    "local step": "#3a9d6e",
    "step": "#7a4fa3",
    "wait": "#dddddd",
    "checkpoint": "#555555",
    "evaluate": "#999999",
}
"""What is drawn; the later ones over the earlier ones."""
_MOST_BYTES = 1 << 26
_MOST_RANKS = 64
_SHOWN = 4
"""Steps of the first rank in a picture."""


class Span(BaseModel):
    """A complete event of a trace, in microseconds."""

    name: str
    pid: int = Field(ge=0, lt=2**31)
    ts: float = Field(ge=0, lt=1e18)
    dur: float = Field(ge=0, lt=1e15)

    @property
    def kind(self) -> str:
        """What it is drawn as."""
        return "wait" if self.name.startswith("wait") else self.name


def spans(file: Path) -> list[Span]:
    """Those of a trace that can be drawn; none of one that cannot be read."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return []
        events = json.loads(file.read_text())["traceEvents"]
        complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
        return [Span.model_validate(event) for event in complete]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return []


def timeline(found: Sequence[Span], steps: int = _SHOWN) -> Figure | None:
    """So many steps of the first rank, some time after its first one, a row a rank.

    None if there is nothing to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ends = sorted(s.ts + s.dur for s in found if s.pid == 0 and s.name == "step")
    if len(ends) < 2:
        return None
    first = min(len(ends) // 4, max(0, len(ends) - 1 - steps))
    start, stop = ends[first], ends[min(first + steps, len(ends) - 1)]
    shown = [s for s in found if s.ts < stop and s.ts + s.dur > start and s.kind in COLOURS]
    ranks = sorted({s.pid for s in shown})[:_MOST_RANKS]
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for s in shown:
        bars.setdefault((s.pid, s.kind), []).append(((s.ts - start) / 1e3, s.dur / 1e3))
    figure = Figure(figsize=(11.4, 0.9 + 0.34 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for kind, colour in COLOURS.items():
        for row, rank in enumerate(ranks):
            place = (row - 0.4, 0.8)
            axes.broken_barh(bars.get((rank, kind), []), place, color=colour, linewidth=0)
    axes.set_xlim(0, (stop - start) / 1e3)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = {s.kind for s in shown}
    patches = [Patch(color=c, label=kind) for kind, c in COLOURS.items() if kind in kinds]
    figure.legend(
        handles=patches, frameon=False, fontsize="small", ncols=7, loc="outside upper left"
    )
    return figure
