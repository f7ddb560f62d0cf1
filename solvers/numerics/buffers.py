"""Buffers that a forward pass changes, which only some passes may do."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hybrid.solvers.layers.projection import Projection

Tensors = dict[str, Tensor]

_APART = (_NormBase, Projection)
"""Not of interest here: statistics have a switch, and only sub-problems change a dictionary."""


def has_changing_buffers(modules: Iterable[nn.Module]) -> bool:
    """Whether any has buffers, other than BatchNorm's, that forward passes may change."""
    return any(m._buffers and not isinstance(m, _APART) for m in modules)


@contextmanager
def captured_buffers(
    module: nn.Module, norms: bool = False, first: Container[str] = ()
) -> Iterator[Tensors]:
    """A context that gives, at its end, the buffers changed within it as they were before, by name.

    BatchNorm's are given only with `norms`; with `first`, only those of these children. A buffer
    that does not change, such as a mask, is not given.
    """
    buffers: Tensors = {
        f"{path}.{name}" if path else name: buffer
        for path, m in module.named_modules()
        if not isinstance(m, _APART) or (norms and isinstance(m, _NormBase))
        for name, buffer in m._buffers.items()
        if buffer is not None and (not first or path.partition(".")[0] in first)
    }
    copies = _cloned(buffers)
    yield copies
    for name, buffer in buffers.items():
        path, _, field = name.rpartition(".")
        now = module.get_submodule(path)._buffers[field]
        # versions would not tell: BatchNorm's kernels and changes of .data do not count there
        if now is buffer and torch.equal(buffer, copies[name]):
            del copies[name]


def _cloned(values: Tensors) -> Tensors:
    """Copies, one of each tensor."""
    clones = {id(value): value.clone() for value in values.values()}
    return {name: clones[id(value)] for name, value in values.items()}


def set_buffers(module: nn.Module, values: Tensors) -> Tensors:
    """Give a module these buffers; returns those that it had before."""
    names = [name.rpartition(".") for name in values]
    places = [(module.get_submodule(path)._buffers, field) for path, _, field in names]
    before = {}
    for name, (buffers, field) in zip(values, places, strict=True):
        before[name], buffers[field] = buffers[field], values[name]
    return before  # type: ignore[return-value]


@contextmanager
def replaced_buffers(module: nn.Module, values: Tensors) -> Iterator[None]:
    """A context in which a module has copies of these buffers; its own come back unchanged."""
    before = set_buffers(module, _cloned(values))
    try:
        yield
    finally:
        set_buffers(module, before)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """A context in which forward passes leave running statistics and all buffers as they were.

    They belong to the composed network, and only a serial pass goes through all of it. BatchNorm
    normalizes by the batch.
    """
    modules = list(module.modules())
    norms = [m for m in modules if isinstance(m, _NormBase) and m.track_running_stats]
    for m in norms:
        m.track_running_stats = False
    changed: Tensors = {}
    changing = has_changing_buffers(modules)
    try:
        with captured_buffers(module) if changing else nullcontext(changed) as changed:
            yield
    finally:
        set_buffers(module, changed)  # not a copy into the changed buffers: a graph may hold these
        for m in norms:
            m.track_running_stats = True
