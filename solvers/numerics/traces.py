"""Trials of a user's code that leave no trace in it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

Undo = Callable[[], object]


@contextmanager
def untraced(*functions: Any) -> Iterator[None]:
    """Within it losses may be called; what they keep is afterwards what it was before.

    That is the buffers and attributes of objects, and what functions enclose; containers and
    tensors among these stay the same objects.
    """
    undo: list[Undo] = []
    seen: set[int] = set()
    for function in functions:
        for part in function.modules() if isinstance(function, nn.Module) else [function]:
            _remember(getattr(part, "__dict__", None), undo, seen)
            for cell in getattr(part, "__closure__", None) or ():
                with suppress(ValueError):  # it is empty
                    undo.append(_setter(cell, cell.cell_contents))
                    _remember(cell.cell_contents, undo, seen)
    try:
        yield
    finally:
        for each in undo:
            each()


def _setter(cell: Any, content: Any) -> Undo:
    return lambda: setattr(cell, "cell_contents", content)


def _remember(value: Any, undo: list[Undo], seen: set[int]) -> None:
    """Note how to put a container or a tensor, and what is in it, back to what it is now."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if type(value) in (dict, OrderedDict):
        undo.append(_filler(value, dict(value)))
        inside = value.values()
    elif type(value) in (list, set, deque):
        undo.append(_filler(value, list(value)))
        inside = value
    elif type(value) is Tensor:
        undo.append(_writer(value, value._version, value.detach().clone()))
    for each in [*inside]:
        _remember(each, undo, seen)


def _filler(container: Any, content: Any) -> Undo:
    def fill() -> None:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(content)

    return fill


def _writer(tensor: Tensor, version: int, content: Tensor) -> Undo:
    def write() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.detach().copy_(content)

    return write
