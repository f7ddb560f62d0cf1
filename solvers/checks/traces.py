"""Trials of a user's code that leave no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from hybrid.solvers.numerics.attributes import keeper


@contextmanager
def untraced(function: Any) -> Iterator[None]:
    """Within it a loss may be called; what it keeps is afterwards what it was before.

    That is the buffers and attributes of an object, and what a function encloses.
    """
    known: dict[int, Callable[[], Any]] = {}
    parts = list(function.modules()) if isinstance(function, nn.Module) else [function]
    states = [keeper(vars(part), known) for part in parts if hasattr(part, "__dict__")]
    cells = []
    for cell in (c for part in parts for c in getattr(part, "__closure__", None) or ()):
        with suppress(ValueError):  # it is empty
            cells.append((cell, keeper(cell.cell_contents, known)))
    try:
        yield
    finally:
        for restored in states:
            restored()
        for cell, restored in cells:
            cell.cell_contents = restored()
