"""The cost of a unit: counted work, the same on every machine, or measured seconds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hybrid.networks.remote_tensor import RemoteTensor
from hybrid.networks.units import BlockModule, Unit, make_single_unit_blocks, merged, mode
from hybrid.solvers.layers.branches import nothing_left_out, survival
from hybrid.solvers.layers.bundle import Crossing, each
from hybrid.solvers.local_work.budget import Cost
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.numerics.draws import DispatchMode
from hybrid.solvers.numerics.uncompiled import paired

OPERATIONS_A_BYTE = 4.0
"""Floating-point operations that take as long as moving one byte.

The value fits each residual block of ResNet-20 within 8 % and of WRN-16-4 within 2 %, on one Zen 3
core. A wrong value shifts the balance between layers that compute much
and layers that move much memory.
"""
FEW = 2, 4
"""Numbers of samples for which operations are counted."""
BUDGET = 1.5
"""Seconds for which passes over one batch are repeated."""


class Moved(NamedTuple):
    """What one operation does."""

    flops: float
    """Floating-point operations."""
    num_bytes: float
    """Read and written."""


Ways = tuple[list[Moved], list[Moved]]
"""Operations of a forward and a backward pass."""


@contextmanager
def _unchanged_model(model: nn.Module) -> Iterator[None]:
    """A context in which all units run, and the model's gradients and buffers are kept."""
    gradients = [(p, p.grad) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with mode(model, model.training), frozen_statistics(model), nothing_left_out():
        yield
    for parameter, gradient in gradients:
        parameter.grad = gradient


def count_costs(model: nn.Module, chain: Sequence[Unit], sample: Tensor) -> list[Cost]:
    """Operations of each unit's forward and backward pass over one sample.

    `sample` is a batch (N, ...). A unit counts by the share of passes that it runs in. The model is
    not changed.
    """
    (counted,) = count_moved(model, chain, sample, [len(sample)])
    return [
        Cost(*(survival_rate(unit) * weigh(moved) / len(sample) for moved in passes))
        for unit, passes in zip(chain, counted, strict=True)
    ]


def weigh(moved: Sequence[Moved]) -> float:
    """Floating-point operations, and those that moving the bytes would be worth."""
    return sum(each.flops + OPERATIONS_A_BYTE * each.num_bytes for each in moved)


def count_moved(
    model: nn.Module, chain: Sequence[Unit], sample: Tensor, sizes: Sequence[int]
) -> list[list[Ways]]:
    """What each operation of every unit's passes does, for each number of samples like `sample`.

    Work is a line over the number of samples: passes over two and four tell it for all, unless the
    number of operations depends on that, too. The model is not changed.
    """

    def counted(n: int) -> list[Ways]:
        x = sample[:n] if n <= len(sample) else sample[:1].repeat_interleave(n, 0)
        return _count_passes(model, chain, x)

    if max(sizes) <= FEW[1]:
        return [counted(n) for n in sizes]
    of_two, of_four = map(counted, FEW)
    pairs = [*zip(of_two, of_four, strict=True)]
    if any(len(a) != len(b) for each in pairs for a, b in zip(*each, strict=True)):
        return [counted(n) for n in sizes]
    return [[(_extended(a[0], b[0], n), _extended(a[1], b[1], n)) for a, b in pairs] for n in sizes]


def _count_passes(model: nn.Module, chain: Sequence[Unit], x: Tensor) -> list[Ways]:
    """What the operations of every unit's forward and backward pass over x do."""
    counts = []
    with _unchanged_model(model), _gradients_dropped(model):
        for i, module in enumerate(make_single_unit_blocks(chain)):
            counts.append(count_operations(module, x, i > 0))
            with torch.no_grad():
                x = module(x, apart=True)
    return counts


@contextmanager
def _gradients_dropped(model: nn.Module) -> Iterator[None]:
    """A context in which no gradient of a parameter stays: together they may fill the memory."""

    def drop(p: Tensor) -> None:
        p.grad = None

    trained = (p for p in model.parameters() if p.requires_grad)
    handles = [p.register_post_accumulate_grad_hook(drop) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _extended(of_two: list[Moved], of_four: list[Moved], n: int) -> list[Moved]:
    """Extrapolate the operations of a pass to n samples, each linear in n."""
    a, b = np.array(of_two, dtype=float), np.array(of_four, dtype=float)
    line = a + (b - a) * ((n - FEW[0]) / (FEW[1] - FEW[0]))
    return [Moved(*row) for row in np.maximum(line, 0.0).reshape(-1, 2).tolist()]


def count_operations(module: nn.Module, x: Crossing, with_input: bool) -> Ways:
    """What each operation of a module's forward and backward pass does."""
    apart = {"apart": True} if isinstance(module, BlockModule) else {}
    with _Counter() as counter:
        out = module(each(lambda t: t.detach().requires_grad_(with_input), x), **apart)
        forward = counter.take()
        _backward(out)
    return forward, counter.take()


def measure_costs(model: nn.Module, chain: Sequence[Unit], sample: Tensor) -> list[Cost]:
    """Seconds of each unit's passes over one sample, times the share of passes it runs in."""
    return measure_passes(model, chain, [sample])[0]


def measure_passes(
    model: nn.Module, chain: Sequence[Unit], samples: Sequence[Tensor]
) -> list[list[Cost]]:
    """Seconds of every unit for one sample, times the share of passes it runs in, for each sample.

    They are medians over passes through the whole chain, after one to warm up. The samples take
    turns, so that a slow moment of the machine slows all of them. As in training, the caches are
    full of other units' data when a unit begins. Turns are repeated for `BUDGET` seconds for each
    of `samples`, at least 3 and at most 9 times. The model is not changed.
    """
    modules = make_single_unit_blocks(chain)
    turns: list[list[list[Cost]]] = []
    began, budget = perf_counter(), BUDGET * len(samples)
    with _unchanged_model(model):
        while len(turns) < 4 or (len(turns) < 10 and perf_counter() - began < budget):
            turns.append([_time_units(modules, x) for x in samples])
    passes = []
    for x, taken in zip(samples, zip(*turns[1:], strict=True), strict=True):
        costs = []
        for unit, times in zip(chain, zip(*taken, strict=True), strict=True):
            forward, backward = (median(way) / len(x) for way in zip(*times, strict=True))
            often = survival_rate(unit)
            costs.append(Cost(often * forward, often * backward))
        passes.append(costs)
    return passes


def merge_packed_units(block: Sequence[Unit]) -> list[Unit]:
    """A block's units, merged where several tensors go between them: only cuts pack tensors."""
    starts = [i for i, unit in enumerate(block) if i == 0 or unit.bundle is None]
    return [merged(block[a:b]) for a, b in pairwise([*starts, len(block)])]


def survival_rate(unit: Unit) -> float:
    """The share of training passes in which a unit runs."""
    return prod(survival(part) for part in unit.parts.values())


def _time_units(modules: Sequence[nn.Module], sample: Tensor) -> list[Cost]:
    x: Any = sample
    graphs, forwards, backwards = [], [], []
    for i, module in enumerate(modules):
        lam = each(lambda t, wanted=i > 0: t.detach().requires_grad_(wanted), x)
        start = _read_clock(lam)
        x = module(lam, apart=True)
        forwards.append(_read_clock(x) - start)
        graphs.append((lam, x))
    p: Any = None
    for lam, out in reversed(graphs):
        start = _read_clock(lam)
        _backward(out, p)
        backwards.append(_read_clock(lam) - start)
        p = each(lambda t: t.grad, lam)
    return [Cost(f, b) for f, b in zip(forwards, reversed(backwards), strict=True)]


def _backward(out: Any, p: Any = None) -> None:
    """The backward pass from p, or from ones, for any output of a network."""
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    adjoints = [None] * len(outputs) if p is None else tree_leaves(p, is_leaf=lambda x: x is None)
    pairs = zip(outputs, adjoints, strict=True)
    ends = [(x, torch.ones_like(x) if y is None else y) for x, y in pairs if x.requires_grad]
    if ends:
        torch.autograd.backward([paired(x, y) for x, y in ends])


class _Counter(DispatchMode):
    """Counts operations, and the bytes of the tensors that they read and write.

    torch's own FlopCounterMode imports the compiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moved: list[Moved] = []

    def take(self) -> list[Moved]:
        """What operations have done since the last call."""
        taken, self._moved = self._moved, []
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
        if any(isinstance(x, RemoteTensor) or x.is_meta for x in tensors):
            return out  # another block's, of which there is only the shape
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        num_bytes = 0
        # neither the number from which `_backward` starts, nor that number's gradient
        makers = torch.ops.aten.new_zeros.default, torch.ops.aten.ones_like.default
        if not func.is_view and not (func in makers and out.dim() == 0):
            num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        if flops or num_bytes:
            self._moved.append(Moved(flops, num_bytes))
        return out


def _read_clock(x: Any) -> float:
    """The time; on one thread that of the processor, which does not count other programs."""
    if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(x)):
        torch.cuda.synchronize()
        return perf_counter()
    return thread_time() if torch.get_num_threads() == 1 else perf_counter()
