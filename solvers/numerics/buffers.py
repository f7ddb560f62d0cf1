"""Buffers and plain attributes that forward passes change, but only some passes may change."""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hybrid.solvers.numerics.attributes import (
    attributes,
    code_of,
    is_number,
    is_plain_tensor,
    is_same,
    is_unchanged,
    restored_attributes,
    user_modules,
)

Tensors = dict[str, Tensor]

PLAIN = "attribute "
"""The prefix of the names of plain attributes: numbers, or None as an empty tensor."""


def has_changing_buffers(modules: Iterable[nn.Module]) -> bool:
    """Whether any module has buffers, other than BatchNorm's, that forward passes may change."""
    return any(m._buffers and not isinstance(m, _NormBase) for m in modules)


@contextmanager
def captured_buffers(module: nn.Module, first: Container[str] = ()) -> Iterator[Tensors]:
    """Record, by name, the old values of the buffers that the body changes.

    Unchanged buffers, such as masks, and BatchNorm's, which have a switch, are left out; with
    `first`, all but the buffers of these children. Plain attributes that are numbers, tensors or
    None count as buffers.
    """
    plain = {
        f"{path}.{name}": (m, name, value.clone() if isinstance(value, Tensor) else value)
        for path, m in user_modules(module).items()
        if not first or path.partition(".")[0] in first
        for name, value in attributes(m).items()
        if value is None or is_number(value) or is_plain_tensor(value)
    }
    buffers: Tensors = {
        f"{path}.{name}" if path else name: buffer
        for path, m in module.named_modules()
        if not isinstance(m, _NormBase)
        for name, buffer in m._buffers.items()
        if buffer is not None and (not first or path.partition(".")[0] in first)
    }
    copies = _cloned(buffers)
    yield copies
    for name, buffer in buffers.items():
        path, _, field = name.rpartition(".")
        now = module.get_submodule(path)._buffers[field]
        # version counters do not see BatchNorm's kernels or writes to .data
        if now is buffer and is_unchanged(buffer, copies[name]):
            del copies[name]
    for name, (m, field, value) in plain.items():
        now = vars(m).get(field)
        if isinstance(value, Tensor):
            copies |= {} if is_unchanged(now, value) else {name: value}
        elif not is_same(now, value):
            wide = torch.float64 if isinstance(value, float) else None
            copies[PLAIN + name] = torch.tensor([] if value is None else value, dtype=wide)


def _cloned(values: Tensors) -> Tensors:
    """Clone values, each tensor once."""
    clones = {id(value): value.clone() for value in values.values()}
    return {name: clones[id(value)] for name, value in values.items()}


def set_buffers(module: nn.Module, values: Tensors) -> Tensors:
    """Set buffers and plain attributes of a module; return the buffers before."""
    before: Tensors = {}
    for name, value in values.items():
        path, _, field = name.removeprefix(PLAIN).rpartition(".")
        m = module.get_submodule(path)
        if field in m._buffers:
            before[name], m._buffers[field] = m._buffers[field], value  # type: ignore[assignment]
        elif name.startswith(PLAIN):
            vars(code_of(m))[field] = value.item() if value.numel() else None
        else:
            vars(code_of(m))[field] = value
    return before


@contextmanager
def replaced_buffers(module: nn.Module, values: Tensors) -> Iterator[None]:
    """Use copies of captured values in a module within the body, and restore its own after."""
    with restored_attributes(user_modules(module).values()):
        before = set_buffers(module, _cloned(values))
        try:
            yield
        finally:
            set_buffers(module, before)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Restore running statistics and all buffers after forward passes in the body.

    Plain attributes of user modules are restored, too. All of these belong to the composed network,
    and only a serial pass goes through all of it. BatchNorm normalizes by the batch.
    """
    modules = list(module.modules())
    norms = [m for m in modules if isinstance(m, _NormBase) and m.track_running_stats]
    for m in norms:
        m.track_running_stats = False
    changed: Tensors = {}
    changing = has_changing_buffers(modules)
    with restored_attributes(user_modules(module).values()):
        try:
            with captured_buffers(module) if changing else nullcontext(changed) as changed:
                yield
        finally:
            # no copy into the changed buffers: a graph may hold these
            set_buffers(module, changed)
            for m in norms:
                m.track_running_stats = True
