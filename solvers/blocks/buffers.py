"""Buffers that a forward pass moves, which only some passes may do."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from solvers.layers.projection import Projection
from solvers.state import Tensors

_APART = (_NormBase, Projection)
"""Statistics, which have a switch of their own, and what sub-problems move (a dictionary)."""


def has_others(modules: Iterable[nn.Module]) -> bool:
    """Whether any has buffers that forward passes may move and that are not BatchNorm's."""
    return any(m._buffers and not isinstance(m, _APART) for m in modules)


@contextmanager
def captured_buffers(
    module: nn.Module, norms: bool = False, first: Container[str] = ()
) -> Iterator[Tensors]:
    """Holds, once it is left, the buffers that have moved within it as they were before, by name.

    Those of BatchNorm only with `norms`; with `first` only those whose names begin so, up to a
    dot. A buffer that nothing moves, as a mask, is held by nobody.
    """
    own: Tensors = {
        f"{path}.{name}" if path else name: buffer
        for path, m in module.named_modules()
        if not isinstance(m, _APART) or (norms and isinstance(m, _NormBase))
        for name, buffer in m._buffers.items()
        if buffer is not None and (not first or path.partition(".")[0] in first)
    }
    copies = _cloned(own)
    yield copies
    for name, buffer in own.items():
        path, _, field = name.rpartition(".")
        now = module.get_submodule(path)._buffers[field]
        # not by versions, which kernels of BatchNorm and changes of .data leave as they are
        if now is buffer and torch.equal(buffer, copies[name]):
            del copies[name]


def _cloned(values: Tensors) -> Tensors:
    """Copies, one of each tensor."""
    known = {id(value): value.clone() for value in values.values()}
    return {name: known[id(value)] for name, value in values.items()}


def put(module: nn.Module, values: Tensors) -> Tensors:
    """Give a module these buffers; those that it had before."""
    names = [name.rpartition(".") for name in values]
    places = [(module.get_submodule(path)._buffers, field) for path, _, field in names]
    before = {}
    for name, (buffers, field) in zip(values, places, strict=True):
        before[name], buffers[field] = buffers[field], values[name]
    return before  # type: ignore[return-value]


@contextmanager
def standing_in(module: nn.Module, values: Tensors) -> Iterator[None]:
    """Within it a module has these buffers, and may move them; its own come back untouched."""
    own = put(module, _cloned(values))
    try:
        yield
    finally:
        put(module, own)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Running statistics, and whatever buffers a module moves in forward, are left as they were.

    They belong to the composed network, which only a serial pass sees. BatchNorm normalizes by the
    batch.
    """
    modules = list(module.modules())
    norms = [m for m in modules if isinstance(m, _NormBase) and m.track_running_stats]
    for m in norms:
        m.track_running_stats = False
    moved: Tensors = {}
    try:
        with captured_buffers(module) if has_others(modules) else nullcontext(moved) as moved:
            yield
    finally:
        put(module, moved)  # other tensors: a graph may hold those that have moved
        for m in norms:
            m.track_running_stats = True
