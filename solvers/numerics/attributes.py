"""What modules keep in plain attributes: counters, rates that are annealed, running values."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.solvers.numerics.draws import NumberedDraws

_REGISTRIES = frozenset(vars(nn.Module()))
"""Attributes that torch gives a module."""
_CONTAINERS = (list, deque, set, dict, OrderedDict, Counter, defaultdict)
_LIBRARIES = {"builtins", "torch", "numpy", "transformers", "hybrid", "threading", "_thread"}
MOST_ITEMS = 10_000
"""The longest container that is looked into."""
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_ALL_HOOKS = *_HOOKS, "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"
ELSEWHERE = "_elsewhere"
"""The attribute that names a module's tensors of other blocks, which are none of its state."""


def user_modules(module: nn.Module) -> dict[str, nn.Module]:
    """By path, the modules whose classes are neither torch's nor this package's."""
    named = ((path, code_of(m)) for path, m in module.named_modules())
    ours = ("torch.", "hybrid.")
    return {path: m for path, m in named if not type(m).__module__.startswith(ours)}


def has_user_hooks(module: nn.Module) -> bool:
    """Whether a hook that is not this package's runs in its passes."""
    holders = [*module.modules(), *module.parameters()]
    tables = [getattr(holder, name, None) for holder in holders for name in _ALL_HOOKS]
    return not all(_is_ours(hook) for table in tables if table for hook in table.values())


def code_of(module: nn.Module) -> nn.Module:
    """The module whose code a module runs, usually itself."""
    runs = module.runs if isinstance(module, NumberedDraws) else None
    return module if runs is None else runs


def attributes(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module."""
    others = vars(module).get(ELSEWHERE, ())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _REGISTRIES and name not in others and name != ELSEWHERE
    }


def is_number(value: Any) -> bool:
    """Whether an attribute is a number that a tensor can hold."""
    return isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)


def is_plain_tensor(value: Any) -> bool:
    """Whether an attribute is a tensor with numbers, and not one of another registry's."""
    return type(value) is Tensor and not value.is_meta


def is_same(one: Any, other: Any) -> bool:
    """Whether two numbers or tensors are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def hand_over(source: nn.Module, target: nn.Module) -> None:
    """Give a module copies of another's plain attributes that are numbers, texts or tensors.

    So are lists and dicts of such.
    """
    registered = {*target._parameters, *target._buffers, *target._modules}
    for name, value in attributes(source).items():
        leaves = tree_leaves(value)
        if name not in registered and all(
            isinstance(x, int | float | str | None) or is_plain_tensor(x) for x in leaves
        ):
            vars(target)[name] = tree_map(_copy, value)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context after which modules have the plain attributes and hooks that they had before.

    Tensors have the numbers, and lists, sets and dicts the items, that they had.
    """
    keepers: dict[int, Callable[[], Any]] = {}
    before, inside = [], dict[int, dict[str, Any]]()
    for m in modules:
        by_name = {name: keeper(value, keepers) for name, value in attributes(m).items()}
        before.append((vars(m), by_name))
        if id(m) not in inside:
            inside |= {id(each): vars(each) for each in m.modules()}
    hooks = [(state[name], {*state[name]}) for state in inside.values() for name in _HOOKS]
    try:
        yield
    finally:
        for state, by_name in before:
            for name in state.keys() - by_name.keys() - _REGISTRIES:
                if name not in state.get(ELSEWHERE, ()) and name != ELSEWHERE:
                    del state[name]
            state.update({name: kept() for name, kept in by_name.items()})
        for now, hooks_before in hooks:  # a flag may say that they are there
            for number in [n for n in now.keys() - hooks_before if not _is_ours(now[n])]:
                del now[number]


def _is_ours(hook: Any) -> bool:
    """Whether a hook is this package's, such as one that makes draws repeatable."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("hybrid.")


def has_attributes(x: Any) -> bool:
    """Whether something is an object of a user's class that may keep numbers, and no module."""
    others = type | ModuleType | FunctionType | MethodType | Tensor | nn.Module
    home = type(x).__module__.partition(".")[0]
    return hasattr(x, "__dict__") and not (isinstance(x, others) or home in _LIBRARIES)


def numbers_in(name: str, value: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors without a graph in a value, its items and their attributes."""
    if is_number(value):
        yield name, value
    elif is_plain_tensor(value) and not value.requires_grad:
        yield name, value.clone()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(np.array(value))
    elif depth and isinstance(value, list | tuple | deque | dict) and len(value) <= MOST_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in [*items]:
            yield from numbers_in(f"{name}[{key}]", item, depth - 1)
    elif depth and has_attributes(value):
        for key, item in [*vars(value).items()]:
            yield from numbers_in(f"{name}.{key}", item, depth - 1)


def keeper(value: Any, keepers: dict[int, Callable[[], Any]]) -> Callable[[], Any]:
    """A function that gives a value as it is now; `keepers` are those by identity so far."""
    if id(value) in keepers:
        return keepers[id(value)]
    if is_plain_tensor(value):
        copy = value.detach().clone()
        # not a copy into the changed tensor: a graph may hold it
        keepers[id(value)] = lambda: value if torch.equal(value, copy) else copy
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        copy = value.copy()
        keepers[id(value)] = lambda: (value.__setitem__(..., copy), value)[1]
    elif type(value) in _CONTAINERS and len(value) <= MOST_ITEMS:  # others may not be written to
        keepers[id(value)] = lambda: value  # in case it is its own item
        keepers[id(value)] = _container_keeper(value, keepers)
    elif has_attributes(value) and len(keepers) < MOST_ITEMS:
        keepers[id(value)] = lambda: value
        state = keeper(vars(value), keepers)
        keepers[id(value)] = lambda: (state(), value)[1]
    else:
        return lambda: value
    return keepers[id(value)]


def _container_keeper(value: Any, keepers: dict[int, Callable[[], Any]]) -> Callable[[], Any]:
    """Gives a container with the items that it has now; if it still has them, it is let alone."""
    item_keepers = [(key, keeper(x, keepers)) for key, x in _pairs(value)]

    def restored() -> Any:
        before, now = [(key, kept()) for key, kept in item_keepers], _pairs(value)
        if len(now) == len(before) and all(
            i == j and x is y for (i, x), (j, y) in zip(now, before, strict=True)
        ):
            return value
        value.clear()
        if isinstance(value, dict):
            value.update(dict(before))
        else:
            (value.update if isinstance(value, set) else value.extend)(x for _, x in before)
        return value

    return restored


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """The items of a container, with their keys, or none, in its order."""
    return list(value.items()) if isinstance(value, dict) else [(None, x) for x in list(value)]
