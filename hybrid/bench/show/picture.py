"""A picture of a network in blocks: costs of units, traffic of cuts, memory of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.bench.show.description import CutPart, Description, UnitPart, shortened
from hybrid.errors import counted
from hybrid.files import check_file, check_folder, write_atomically
from hybrid.report.page import COLORS, GREY, amount, plain_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")
_GAP, _ROW = 1.5, 0.23
"""Rows between two blocks, with the cut in their middle, and inches of a row."""
_SHADES = {"weights": 1.0, "gradients": 0.7, "optimizer": 0.45, "activations": 0.2}
"""How much of a block's color a part of its memory has; the rest is white."""
_LONGEST = 34
"""Characters of the forms of the tensors at a cut."""


def check_picture(file: Path) -> None:
    """Reject a file into which no picture can be drawn."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file in it, such as {file / 'blocks.svg'}")
    if file.suffix.lower() not in ENDINGS:
        raise ValueError(f"{file} must end in {' or '.join(ENDINGS)}: rename it")
    check_file(file)
    check_folder(file.parent)


def draw(shown: Description, file: Path | str, depth: int | None = None) -> Path:
    """Draw a network in blocks into an SVG or PNG file, atomically; return its path.

    `depth` folds units as in `Description.rows`. ValueError for another ending or an impossible
    path.
    """
    file = Path(file)
    check_picture(file)
    rows, buffer = shown.rows(depth), BytesIO()
    kind = file.suffix.lower()[1:]
    with plain_style():
        metadata = {"Date": None} if kind == "svg" else None
        _figure(shown, rows).savefig(buffer, format=kind, dpi=150, metadata=metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, buffer.getvalue())
    return file


def _figure(shown: Description, rows: Sequence[UnitPart]) -> Figure:
    from matplotlib.figure import Figure

    places = [index + _GAP * row.block for index, row in enumerate(rows)]
    names = max(len(shortened(row.name)) for row in rows)
    size = 10 + 0.07 * names, 1.6 + _ROW * (places[-1] + 1)
    figure = Figure(size, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    figure.suptitle(
        f"{shortened(shown.model)} in {counted(len(shown.blocks), 'block')}: "
        f"{counted(len(shown.units), 'unit')}, {shown.parameters:,} parameters",
        fontweight="bold",
    )
    _draw_costs(left, shown, rows, places)
    _draw_memory(right, shown, rows, places)
    for axes in (left, right):
        axes.set_ylim(places[-1] + 0.7, -0.7)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.tick_params(axis="x", labelsize=8)
    return figure


def _draw_costs(
    axes: Axes, shown: Description, rows: Sequence[UnitPart], places: Sequence[float]
) -> None:
    """Draw a bar for each row, and a line at each cut with its traffic."""
    largest = max(row.share for row in rows) or 1.0
    for row, y in zip(rows, places, strict=True):
        axes.barh(y, 100 * row.share, 0.78, color=_color(row.block))
        axes.text(
            100 * row.share + largest, y, f"{row.share:.1%}", va="center", fontsize=7, color=GREY
        )
    axes.set_xlim(0, 112 * largest)
    folded = [f" ({row.units} units)" if row.units > 1 else "" for row in rows]
    names = [shortened(row.name) + units for row, units in zip(rows, folded, strict=True)]
    axes.set_yticks(places, names)
    axes.set_xlabel("share of the cost, %", fontsize=9)
    axes.set_title(f"cost of the units, forward and backward, {shown.cost}", fontsize=9, loc="left")
    for number, (cut, y) in enumerate(zip(shown.cuts, _lines(rows, places), strict=True), 1):
        axes.axhline(y, color=GREY, linewidth=1, linestyle="dashed")
        text = f"cut {number}: {_crossing(cut, shown.batch_size)}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.6 * largest, y, text, va="center", fontsize=7.5, color=GREY, bbox=box)


def _draw_memory(
    axes: Axes, shown: Description, rows: Sequence[UnitPart], places: Sequence[float]
) -> None:
    """Draw a stacked bar for each block, beside its units."""
    totals = [sum(block.memory.values()) for block in shown.blocks]
    power, unit = next(
        (p, u) for p, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if max(totals) >= p
    )
    ticks = []
    for index, block in enumerate(shown.blocks):
        ys = [y for row, y in zip(rows, places, strict=True) if row.block == index]
        ticks.append((ys[0] + ys[-1]) / 2)
        before, height = 0.0, min(0.78 + ys[-1] - ys[0], 2.2)
        for name, num_bytes in block.memory.items():
            size, color = num_bytes / power, _shaded(_color(index), name)
            axes.barh(ticks[-1], size, height, before, color=color)
            before += size
        right = before + 0.01 * max(totals) / power
        axes.text(right, ticks[-1], amount(totals[index]), va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * max(totals) / power)
    labels = [
        f"block {k}: {block.share:.1%} of the cost\n{block.parameters:,} parameters"
        for k, block in enumerate(shown.blocks)
    ]
    axes.set_yticks(ticks, labels)
    training = f"{shown.optimizer}, mini-batches of {shown.batch_size}"
    axes.set_xlabel(f"memory, {unit} ({training})", fontsize=9)
    axes.set_title("memory of the blocks", fontsize=9, loc="left")
    for y in _lines(rows, places):
        axes.axhline(y, color=GREY, linewidth=1, linestyle="dashed")
    for name in _SHADES:
        axes.barh(0, 0, color=_shaded(GREY, name), label=name)
    assert axes.figure is not None
    axes.figure.legend(loc="outside lower right", ncols=len(_SHADES), fontsize=8, frameon=False)


def _lines(rows: Sequence[UnitPart], places: Sequence[float]) -> list[float]:
    """Return the positions of cuts between the rows."""
    pairs = zip(rows, rows[1:], places, places[1:], strict=False)
    return [(y + below) / 2 for row, after, y, below in pairs if row.block != after.block]


def _crossing(cut: CutPart, batch_size: int) -> str:
    forms = ", ".join(map(str, cut.tensors))
    if len(forms) > _LONGEST:
        forms = f"{len(cut.tensors)} tensors"
    ways = [amount(size) for size in (cut.batch_bytes, cut.back_bytes)]
    both = f"{ways[0]} a mini-batch, each way"
    if ways[0] != ways[1]:
        both = f"{ways[0]} a mini-batch forward, {ways[1]} back"
    return f"{forms}; {amount(cut.sample_bytes)} a sample, {both}"


def _color(block: int) -> str:
    return COLORS[block % len(COLORS)]


def _shaded(color: str, name: str) -> tuple[float, ...]:
    """Shade a block's color for a part of its memory."""
    from matplotlib.colors import to_rgb

    return tuple(1 - _SHADES[name] * (1 - part) for part in to_rgb(color))
