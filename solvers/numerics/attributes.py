"""State that modules keep in plain attributes: counters, annealed rates, running values."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybrid.solvers.numerics.draws import NumberedDraws

_REGISTRIES = frozenset(vars(nn.Module()))
"""Attributes of every torch module."""
_CONTAINERS = (list, deque, set, dict, OrderedDict, Counter, defaultdict)
_LIBRARIES = {"builtins", "torch", "numpy", "transformers", "hybrid", "threading", "_thread"}
_OURS = "torch.", "hybrid."
MOST_ITEMS = 10_000
"""The longest container that is searched."""
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_ALL_HOOKS = *_HOOKS, "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"
ELSEWHERE = "_elsewhere"
"""The attribute with the names of tensors that belong to other blocks, not to this module's state.
"""


def user_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, the modules whose classes are neither torch's nor this package's."""
    named = ((path, code_of(m)) for path, m in module.named_modules())
    return {path: m for path, m in named if not type(m).__module__.startswith(_OURS)}


def has_user_hooks(module: nn.Module) -> bool:
    """Whether a hook from outside this package runs in the module's passes."""
    holders = [*module.modules(), *module.parameters()]
    tables = [getattr(holder, name, None) for holder in holders for name in _ALL_HOOKS]
    return not all(_is_ours(hook) for table in tables if table for hook in table.values())


def find_closed(model: nn.Module, opened: Set[str]) -> frozenset[str]:
    """Return the paths among `opened` of modules whose code does nothing but compute outputs.

    It is torch's or this package's and calls no functions of others, such as hooks; the same holds
    for every module of `opened` inside.
    """
    modules, users = dict(model.named_modules()), user_modules(model)
    others = [p for p in opened if p in users or _calls_user_code(modules[p])]
    around = {p[:n] for p in others for n in range(len(p) + 1) if p[n : n + 1] in ("", ".")}
    return frozenset(opened - around - {""})


def _calls_user_code(module: nn.Module) -> bool:
    homes = [str(f.__module__) for f in attributes(module).values() if callable(f)]
    return has_user_hooks(module) or not all(each.startswith(_OURS) for each in homes)


def code_of(module: nn.Module) -> nn.Module:
    """Return the module whose code a module runs, usually itself."""
    runs = module.runs if isinstance(module, NumberedDraws) else None
    return module if runs is None else runs


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module."""
    others = vars(module).get(ELSEWHERE, ())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _REGISTRIES and name not in others and name != ELSEWHERE
    }


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor can hold."""
    return isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a plain tensor with data, not a parameter or another subclass."""
    return type(value) is Tensor and not value.is_meta


def is_same(one: Any, other: Any) -> bool:
    """Whether two numbers or tensors are equal in type and value."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def is_unchanged(now: Any, copy: Tensor) -> bool:
    """Whether a value is known to be a tensor with its copy's numbers.

    On a GPU it is not: the host would have to wait for it.
    """
    is_read = isinstance(now, Tensor) and not now.is_cuda
    return is_read and now.dtype == copy.dtype and torch.equal(now, copy)


def copy_attributes(source: nn.Module, target: nn.Module) -> None:
    """Copy plain attributes that are numbers, texts or tensors, or lists and dicts of these."""
    registered = {*target._parameters, *target._buffers, *target._modules}
    for name, value in attributes(source).items():
        leaves = tree_leaves(value)
        if name not in registered and all(
            isinstance(x, int | float | str | None) or is_plain_tensor(x) for x in leaves
        ):
            vars(target)[name] = tree_map_only(Tensor, lambda x: x.detach().clone(), value)


@contextmanager
def restored_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the plain attributes and hooks of modules after the body.

    Tensors get their numbers back, and lists, sets and dicts their items.
    """
    keepers: dict[int, Callable[[], Any]] = {}
    before, submodules = [], dict[int, dict[str, Any]]()
    for m in modules:
        by_name = {name: keeper(value, keepers) for name, value in attributes(m).items()}
        before.append((vars(m), by_name))
        if id(m) not in submodules:
            submodules |= {id(each): vars(each) for each in m.modules()}
    hooks = [(state[name], {*state[name]}) for state in submodules.values() for name in _HOOKS]
    try:
        yield
    finally:
        for state, by_name in before:
            for name in state.keys() - by_name.keys() - _REGISTRIES:
                if name not in state.get(ELSEWHERE, ()) and name != ELSEWHERE:
                    del state[name]
            state.update({name: restore() for name, restore in by_name.items()})
        for now, hooks_before in hooks:
            for number in [n for n in now.keys() - hooks_before if not _is_ours(now[n])]:
                del now[number]


def _is_ours(hook: Any) -> bool:
    """Whether a hook belongs to this package, such as one that makes draws repeatable."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("hybrid.")


def has_attributes(x: Any) -> bool:
    """Whether a value is an object of a user's class that may hold numbers, and not a module."""
    others = type | ModuleType | FunctionType | MethodType | Tensor | nn.Module
    home = type(x).__module__.partition(".")[0]
    return hasattr(x, "__dict__") and not (isinstance(x, others) or home in _LIBRARIES)


def numbers_in(name: str, value: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Iterate over numbers and tensors without a graph in a value, its items and attributes."""
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
    """Make a function that restores and returns a value; `keepers` has those made so far, by id."""
    if id(value) in keepers:
        return keepers[id(value)]
    if is_plain_tensor(value):
        copy = value.detach().clone()
        # no copy into the changed tensor: a graph may hold it
        keepers[id(value)] = lambda: value if is_unchanged(value, copy) else copy
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        copy = value.copy()
        keepers[id(value)] = lambda: (value.__setitem__(..., copy), value)[1]
    elif type(value) in _CONTAINERS and len(value) <= MOST_ITEMS:  # others may be immutable
        keepers[id(value)] = lambda: value  # a container may contain itself
        keepers[id(value)] = _container_keeper(value, keepers)
    elif has_attributes(value) and len(keepers) < MOST_ITEMS:
        keepers[id(value)] = lambda: value
        state = keeper(vars(value), keepers)
        keepers[id(value)] = lambda: (state(), value)[1]
    else:
        return lambda: value
    return keepers[id(value)]


def _container_keeper(value: Any, keepers: dict[int, Callable[[], Any]]) -> Callable[[], Any]:
    """Make a function that restores a container's items, and does not touch an unchanged one."""
    item_keepers = [(key, keeper(x, keepers)) for key, x in _pairs(value)]

    def restore() -> Any:
        before, now = [(key, keep()) for key, keep in item_keepers], _pairs(value)
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

    return restore


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """List the items of a container in order, with their keys or None."""
    return list(value.items()) if isinstance(value, dict) else [(None, x) for x in list(value)]
