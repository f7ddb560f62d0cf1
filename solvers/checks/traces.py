"""Trials of user code that restore its state."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from hybrid.solvers.numerics.attributes import has_attributes, keeper

MOST = 10_000
"""The most objects to visit."""


def holders(function: Any, without: Container[int] = ()) -> list[Any]:
    """List the modules, objects and functions in which a function can store state.

    They are reached through closures, defaults, bound objects, arguments of a `partial`, attributes
    and containers. `without`: ids of objects to leave out.
    """
    holding, waiting, seen = list[Any](), [function], set[int]()
    while waiting and len(seen) < MOST:
        each = waiting.pop()
        if id(each) in seen or id(each) in without:
            continue
        if isinstance(each, nn.Module):
            holding += [m for m in each.modules() if id(m) not in seen and id(m) not in without]
            seen |= {id(m) for m in each.modules()}
            waiting += [x for m in each.modules() for x in vars(m).values()]
            continue
        seen.add(id(each))
        if isinstance(each, list | tuple | set | dict):
            waiting += [*(each.values() if isinstance(each, dict) else each)][:MOST]
        elif isinstance(each, FunctionType):
            holding.append(each)
            waiting += [*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
            waiting += [content for _, _, content in _cells(each)]
        elif isinstance(each, MethodType):
            waiting += [each.__self__, each.__func__]
        elif isinstance(each, partial):
            waiting += [each.func, each.args, each.keywords]
        elif has_attributes(each):
            holding.append(each)
            waiting += [*vars(each).values(), vars(type(each)).get("__call__")]
    return holding


def enclosed(part: Any) -> dict[str, Any]:
    """Return an object's attributes, or a function's defaults and closure, by name."""
    if not isinstance(part, FunctionType):
        return dict(vars(part))
    values = dict(part.__kwdefaults__ or {}) | {
        f"default {i}": x for i, x in enumerate(part.__defaults__ or ())
    }
    return values | {name: content for name, _, content in _cells(part)}


@contextmanager
def untraced(function: Any, without: Container[int] = ()) -> Iterator[None]:
    """Restore the state of a function, such as a loss, after calls in the body.

    `without`: ids of objects that may change in the meantime, such as the network's modules.
    """
    keepers: dict[int, Callable[[], Any]] = {}
    states, cells = [], []
    for part in holders(function, without):
        if not isinstance(part, FunctionType):
            states.append(keeper(vars(part), keepers))
            continue
        states += [keeper(x, keepers) for x in enclosed(part).values() if id(x) not in without]
        cells += [(cell, content) for _, cell, content in _cells(part)]
    try:
        yield
    finally:
        for restore in states:
            restore()
        for cell, content in cells:
            cell.cell_contents = content


def _cells(function: FunctionType) -> list[tuple[str, Any, Any]]:
    """List the names, cells and contents of a function's closure."""
    cells = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            cells.append((name, cell, cell.cell_contents))
    return cells


def graph_leaves(loss: Tensor) -> Iterator[Tensor]:
    """Iterate over the leaves of a graph."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [each for each, _ in node.next_functions]
