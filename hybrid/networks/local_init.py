"""The units of this rank: a network built from its seed, whose other weights take no memory.

A constructor makes large tensors in an order that does not depend on where they lie. Without
memory, on torch's meta device, it tells which of them become parameters of which block. Built
again, a parameter of another block lies in one buffer that all of these share: it is drawn there
by the same kernel, so the generator advances, and what follows has the bits of the whole network.

Where a file has the weights, none is drawn. The network is made without their memory, cut on zeros
that share one memory, and a rank reads the tensors of its block.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.networks.blocks import Blocks
from hybrid.solvers.local_work.budget import Cost
from hybrid.solvers.numerics.draws import DispatchMode
from hybrid.weights import Weights, find_names

LARGE = 2**16
"""Bytes from which a parameter of another block is freed."""
Cut = Callable[..., Blocks]
"""(network, cuts=None) -> the network cut there, or of itself."""


class Allocation(NamedTuple):
    """A large tensor that a constructor makes, and that becomes a parameter of some blocks."""

    blocks: frozenset[int]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Division:
    """How one rank has cut the network, for all ranks."""

    starts: list[int]
    cuts: list[str]
    costs: list[Cost]
    allocations: Mapping[int, Allocation]
    """By their place among the large tensors that the constructor makes; empty: not known."""


def divide(make: Callable[[], nn.Module], cut: Cut, measured: bool) -> Division:
    """The division of the network that `make` builds; `measured`: by times, which need weights.

    A network that can neither be built nor cut without its weights is built whole.
    """
    whole = cut(make()) if measured else None
    restore = remember_generators()
    division = _divide_without_weights(make, cut, None if whole is None else whole.cuts)
    restore()
    if division is None:
        whole = whole or cut(make())
        return Division(whole.starts, whole.cuts, whole.costs, {})
    return division if whole is None else replace(division, costs=whole.costs)


def build_local(
    make: Callable[[], nn.Module], division: Division, local: Collection[int]
) -> nn.Module:
    """The network, in which the weights of the blocks in `local` have the bits that `make` gives.

    Other blocks' large parameters share memory, in which anything may stand.
    """
    foreign = {i: a for i, a in division.allocations.items() if a.blocks.isdisjoint(local)}
    if not foreign:
        return make()
    restore, allocations = remember_generators(), _Allocations(foreign)
    with suppress(Exception):  # which building it whole raises again, if it was not for the memory
        with allocations:
            network = make()
        if not allocations.read:
            return network
    restore()
    return make()


def share_memory(blocks: Blocks, local: Collection[int]) -> None:
    """Give the large parameters of all blocks but those in `local` one memory, which is all zeros.

    Nobody may write there, so the system has no page of it. Shapes and layouts are as they were:
    units run, cost as much, and a loss can be tried out.
    """
    others = _large_parameters(blocks, local)
    zeros = _zeros_for(others)
    for p in others:
        p.data = zeros(p)


def free_remote(blocks: Blocks, index: int) -> None:
    """Give the large parameters of all blocks but `index` one number each, as their memory.

    Who writes there gets torch's error. ValueError if that has happened to the block itself.
    """
    for name, p in blocks.module(index).named_parameters():
        if p.nbytes >= LARGE and not any(p.stride()):
            raise ValueError(
                f"the weights of {blocks.module(index).global_name(name)} are another rank's since "
                "a training before: build the network anew, or keep its cuts"
            )
    for p in _large_parameters(blocks, [index]):
        # the weights of a mean
        number = torch.tensor(len(p) / p.numel(), dtype=p.dtype, device=p.device)
        p.data = number.expand(p.shape)


@contextmanager
def without_weights() -> Iterator[None]:
    """A context in which this thread makes modules without memory for their parameters.

    They lie on torch's meta device, but buffers are computed: what a constructor makes on the meta
    device is made on the CPU, and loses its memory when it becomes a parameter.
    """
    register, thread = nn.Module.register_parameter, get_ident()

    def register_without(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and get_ident() == thread and not (param.is_meta or is_lazy(param)):
            _lay_under(param, param.detach().to("meta"))
        register(module, name, param)

    nn.Module.register_parameter = register_without  # type: ignore[method-assign,assignment]
    try:
        with _NoDraws(), _OnCPU():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True)
class PendingWeights:
    """Weights in files, for a network that is all zeros until `read_weights`."""

    weights: Weights
    names: Mapping[str, str]
    """Names in the network -> in the file."""
    waiting: set[str]
    """Names in the network of tensors that have not been read."""


def find_pending_weights(model: nn.Module, weights: str | Path | None) -> PendingWeights | None:
    """The weights in a file or folder, for a network that gets zeros; None: for one that has its.

    ValueError if they are not the network's, or if something has no numbers that no file has.
    """
    if weights is None:
        empty = next((n for n, x in model.state_dict().items() if x.is_meta), None)
        if empty is not None:
            raise ValueError(
                f"{empty!r} of {type(model).__name__} is on the meta device, without numbers: give "
                "weights=, the safetensors file or folder that has them"
            )
        return None
    there = Weights(weights)
    names = find_names(there, model)
    lay_zeros(model)
    return PendingWeights(there, names, set(names))


def lay_zeros(model: nn.Module) -> None:
    """Give all parameters one memory, which is all zeros, and persistent buffers that have none.

    ValueError for a buffer that has no numbers, and that no file has.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if name in module._non_persistent_buffers_set:
                raise ValueError(
                    f"the buffer {name!r} of {type(module).__name__} is on the meta device, and "
                    "weights do not have it: make the network within hybrid.without_weights(), "
                    "which computes buffers"
                )
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    lay_under(model, _zeros_for(model.parameters()))


def lay_under(model: nn.Module, memory: Callable[[Tensor], Tensor]) -> None:
    """Give every parameter other memory, with what is in it."""
    for p in [*model.parameters()]:
        _lay_under(p, memory(p))


def read_weights(blocks: Blocks, local: Collection[int]) -> None:
    """Read those weights of these blocks that have not been read, in the network's number formats.

    Tensors that are read have separate memory.
    """
    pending, targets = blocks.pending, unread_tensors(blocks, local)
    if pending is None:
        return
    for unit in (u for k in local for u in blocks.units_of(k)):
        pending.waiting.difference_update(unit.parameters(), unit.tensors())
    read = pending.weights.read(targets)
    for name, stored, target in ((n, x, t) for n, x in read for t in targets[n]):
        if isinstance(target, nn.Parameter):
            target.data = torch.empty_like(target.data).copy_(stored)
            if not target.isfinite().all():
                raise ValueError(
                    f"weights {pending.weights.files[name]}: {name!r} has nan or inf in it, as "
                    f"{target.dtype}: copy the file anew, or take a wider number format"
                )
        else:
            target.copy_(stored)


def unread_tensors(blocks: Blocks, local: Collection[int]) -> dict[str, list[Tensor]]:
    """The tensors of these blocks that have not been read, by their names in the file."""
    pending, targets = blocks.pending, dict[str, list[Tensor]]()
    for unit in (u for k in local for u in blocks.units_of(k) if pending is not None):
        assert pending is not None
        parameters = unit.parameters()
        once = {id(p): name for name, p in parameters.items() if name in pending.waiting}
        buffers = {n: x for n, x in unit.tensors().items() if n not in parameters}
        named = {name: parameters[name] for name in once.values()} | buffers
        for name in (n for n in named if n in pending.waiting):
            targets.setdefault(pending.names[name], []).append(named[name])
    return targets


class _OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU that were asked for on torch's meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "meta":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class _NoDraws(DispatchMode):
    """Draws nothing in place without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if _draws_nothing(func, args) else func(*args, **(kwargs or {}))


def _lay_under(p: nn.Parameter, memory: Tensor) -> None:
    """Give a parameter that stays the same object, and tied, other memory, on any device."""
    if memory.device == p.device:
        p.data = memory
        return
    other = nn.Parameter(memory, p.requires_grad)
    other.__dict__.update(p.__dict__)
    swap_tensors(p, other)


def _large_parameters(blocks: Blocks, local: Collection[int]) -> list[nn.Parameter]:
    """Those of all blocks but `local`."""
    excluded = {id(p) for k in local for p in blocks.module(k).parameters()}
    every = (p for k in range(len(blocks)) for p in blocks.module(k).parameters())
    large = (p for p in every if p.nbytes >= LARGE and p.is_floating_point())
    return [p for p in large if id(p) not in excluded]


def _zeros_for(tensors: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """What gives zeros of the shape and layout of each of these, all in one memory."""
    size = max((x.nbytes for x in tensors), default=0) or 1
    private = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)  # no page before somebody writes
    memory = torch.frombuffer(private, dtype=torch.uint8).untyped_storage()

    def zeros(x: Tensor) -> Tensor:
        return torch.empty(0, dtype=x.dtype, device="cpu").set_(memory, 0, x.shape, x.stride())

    return zeros


class _Allocations(DispatchMode):
    """Numbers the large tensors that a constructor makes; `foreign` ones share one memory."""

    def __init__(self, foreign: Mapping[int, Allocation]) -> None:
        super().__init__()
        self.foreign = foreign
        self.count = 0
        self.newest: dict[int, int] = {}
        """The number of the newest tensor in each memory."""
        self.read = False
        """Whether anything was computed from what is shared, or is not as it was foreseen."""
        sizes = (a.dtype.itemsize * torch.Size(a.shape).numel() for a in foreign.values())
        self._shared = torch.UntypedStorage(max(sizes, default=0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _draws_nothing(func, args):
            return args[0]
        inputs = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}

        def place(x: Any) -> Any:
            is_new = isinstance(x, Tensor) and x.nbytes >= LARGE and _memory(x) not in inputs
            return self._place(x) if is_new else x

        out = tree_map(place, func(*args, **(kwargs or {})))
        if self._shared._cdata in inputs:
            outputs = tree_leaves(out)
            inside = [isinstance(x, Tensor) and _memory(x) == self._shared._cdata for x in outputs]
            self.read |= not (inside and all(inside))
        return out

    def _place(self, x: Tensor) -> Tensor:
        number, self.count = self.count, self.count + 1
        self.newest[_memory(x)] = number
        foreseen = self.foreign.get(number)
        if foreseen is None:
            return x
        if (foreseen.shape, foreseen.dtype) != (tuple(x.shape), x.dtype) or not x.is_cpu:
            self.read = True
            return x
        return x.new_empty(0).set_(self._shared, 0, x.shape, x.stride())


def _divide_without_weights(
    make: Callable[[], nn.Module], cut: Cut, cuts: list[str] | None
) -> Division | None:
    """Divide a network without memory for its weights; None where it needs them."""
    try:
        built = _Allocations({})
        with torch.device("meta"), built:
            network = make()
        named = network.named_parameters(remove_duplicate=False)
        numbers = {name: built.newest.get(_memory(p), -1) for name, p in named}
        parameters = {id(p) for p in network.parameters()}
        zeros = _zeros_for(network.parameters())
        network._apply(
            lambda x: zeros(x) if id(x) in parameters else torch.zeros(x.shape, dtype=x.dtype)
        )
        blocks = cut(network, cuts)
    except Exception:  # whatever a user's code does without its weights; with them it says so
        return None
    allocations: dict[int, Allocation] = {}
    for index in range(len(blocks)):
        for unit in blocks.units_of(index):
            for name, p in unit.parameters().items():
                before = allocations.get(numbers[name])
                among = before.blocks if before else frozenset[int]()
                allocations[numbers[name]] = Allocation(among | {index}, tuple(p.shape), p.dtype)
    allocations.pop(-1, None)
    return Division(blocks.starts, blocks.cuts, blocks.costs, allocations)


def _draws_nothing(func: Any, args: Any) -> bool:
    """Whether it draws in place without memory, for which torch would import its compiler."""
    in_place = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
    return in_place and isinstance(args[0], Tensor) and args[0].is_meta


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def remember_generators() -> Callable[[], None]:
    """What sets Python's, numpy's and torch's generators back to what they are now."""
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)

    return restore
