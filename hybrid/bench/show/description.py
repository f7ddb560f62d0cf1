"""The description of a network in blocks, as plain data and as text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hybrid.errors import counted
from hybrid.report.page import amount

MOST_ROWS = 30
"""The most rows of units, unless a depth is given."""
_WIDEST, _BAR = 44, 16
"""Characters of the longest name and of the longest bar."""


@dataclass(frozen=True)
class Form:
    """The form of an input tensor: its name, if any, its type, and one sample's shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        name, sizes = f"{self.name} " if self.name else "", [*map(str, self.shape)]
        plain = self.dtype == "float32" and sizes
        return name + (" x ".join(sizes) if plain else f"{self.dtype}[{','.join(sizes)}]")


@dataclass(frozen=True)
class UnitPart:
    """A unit, or a run of units of one block."""

    name: str
    block: int
    units: int
    """The number of units."""
    parameters: int
    share: float
    """Share of the network's cost, forward and backward, in 0..1."""
    inputs: tuple[Form, ...]


@dataclass(frozen=True)
class CutPart:
    """The traffic of a cut: activations forward, and adjoints backward."""

    before: str
    """The first unit after the cut."""
    tensors: tuple[Form, ...]
    """The tensors that cross it."""
    sample_bytes: int
    batch_bytes: int
    """Bytes of a mini-batch forward."""
    back_bytes: int
    """Bytes of its adjoints."""


@dataclass(frozen=True)
class BlockPart:
    """A block: its units and its memory, without that of a solver."""

    first: str
    last: str
    units: int
    parameters: int
    share: float
    """Share of the network's cost, in 0..1."""
    weight_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes that a forward pass of one mini-batch saves for the backward pass."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""
        return {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }


@dataclass(frozen=True)
class Description:
    """A network in blocks. `str()` is the text that `hybrid show` prints; asdict() the JSON."""

    model: str
    parameters: int
    cost: str
    """counted or measured"""
    batch_size: int
    optimizer: str
    units: tuple[UnitPart, ...]
    blocks: tuple[BlockPart, ...]
    cuts: tuple[CutPart, ...]
    fit: Any = None
    """Whether it fits into a machine's memory: `fitting.Fit`; None: nobody asked."""

    @property
    def imbalance(self) -> float:
        """The cost of the largest block over the mean: 1 is balanced."""
        return max(block.share for block in self.blocks) * len(self.blocks)

    def rows(self, depth: int | None = None) -> list[UnitPart]:
        """Fold units of a block whose names have the same first `depth` parts into one row.

        0: a row for each block. None: the largest depth that gives at most `MOST_ROWS` rows.
        """
        deepest = max(unit.name.count(".") + 1 for unit in self.units)
        if depth is not None:
            return self._folded(depth)
        each = (self._folded(depth) for depth in range(deepest, -1, -1))
        return next((rows for rows in each if len(rows) <= MOST_ROWS), self._folded(0))

    def _folded(self, depth: int) -> list[UnitPart]:
        def key(unit: UnitPart) -> tuple[int, str]:
            return unit.block, ".".join(unit.name.split(".")[:depth])

        rows = []
        for (_, prefix), group in groupby(self.units, key):
            run = [*group]
            first, last = run[0], run[-1]
            name = first.name if len(run) == 1 else f"{first.name} to {last.name}"
            if len(name) > _WIDEST:
                name = f"{first.name} to {last.name.removeprefix(f'{prefix}.')}"
            under = sum(f"{unit.name}.".startswith(f"{prefix}.") for unit in self.units)
            if len(run) > 1 and under == len(run):
                name = prefix
            parameters, share = (sum(getattr(u, k) for u in run) for k in ("parameters", "share"))
            row = replace(first, name=name, units=len(run), parameters=parameters, share=share)
            rows.append(row)
        return rows

    def __str__(self) -> str:
        return self.text()

    def text(self, depth: int | None = None) -> str:
        """Write the units by block with the cuts between, then the memory; `depth` as in `rows`."""
        title = (
            f"{self.model}: {counted(len(self.units), 'unit')}, {self.parameters:,} parameters, "
            f"{counted(len(self.blocks), 'block')}"
        )
        balance = f"; the largest block costs {self.imbalance:.2f} times the mean"
        passes = f"cost: forward and backward pass, {self.cost}"
        lines = [title, passes + balance * (len(self.blocks) > 1), ""]
        lines += [*self._lines_of_units(self.rows(depth)), ""]
        lines += [f"memory of a training by {self.optimizer}, mini-batches of {self.batch_size}"]
        lines += [*self._lines_of_memory(), "", LEFT_OUT]
        return "\n".join([*lines, *(["", str(self.fit)] if self.fit else [])])

    def _lines_of_units(self, rows: Sequence[UnitPart]) -> Iterator[str]:
        """Yield a table of rows, with a line at each cut."""
        largest = max(row.share for row in rows)
        folded = any(row.units > 1 for row in rows)
        head = ["units" * folded, "parameters", "cost", "", "what goes in, of a sample"]
        cells = [["unit", *head]]
        for row in rows:
            bar = "#" * round(_BAR * row.share / largest) if largest else ""
            count = [str(row.units) * folded, f"{row.parameters:,}", f"{row.share:.1%}"]
            cells.append([f"  {shortened(row.name)}", *count, bar, ", ".join(map(str, row.inputs))])
        title, *lines = table(cells, "<>>><<")
        yield title
        for index, block in enumerate(self.blocks):
            if index:
                yield f"--- cut {index}: {self._crossing(index - 1)}"
            yield (
                f"block {index}: {counted(block.units, 'unit')}, {block.parameters:,} parameters, "
                f"{block.share:.1%} of the cost"
            )
            yield from (text for row, text in zip(rows, lines, strict=True) if row.block == index)

    def _crossing(self, index: int) -> str:
        cut = self.cuts[index]
        tensors = ", ".join(map(str, cut.tensors))
        several = f" ({len(cut.tensors)} tensors)" if len(cut.tensors) > 1 else ""
        back = "as much" if cut.back_bytes == cut.batch_bytes else amount(cut.back_bytes)
        return (
            f"{tensors}{several}, {amount(cut.sample_bytes)} a sample, "
            f"{amount(cut.batch_bytes)} a mini-batch, and {back} back"
        )

    def _lines_of_memory(self) -> list[str]:
        names = [*self.blocks[0].memory]
        cells = [["", *names, "together"]]
        for index, block in enumerate(self.blocks):
            values = [*block.memory.values()]
            cells.append([f"block {index}", *map(amount, values), amount(sum(values))])
        return table(cells, "<" + ">" * (len(names) + 1))


LEFT_OUT = (
    "Not in it: the loss, messages, and what a solver keeps, such as auxiliary variables and "
    "several\nmini-batches at once. `hybrid plan` tells the memory of a method."
)


def shortened(name: str) -> str:
    """Shorten a long name in the middle."""
    half = _WIDEST // 2 - 1
    return name if len(name) <= _WIDEST else f"{name[:half]}...{name[-half:]}"


def table(cells: Sequence[Sequence[Any]], sides: str) -> list[str]:
    """Format lines with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in cells
    ]
