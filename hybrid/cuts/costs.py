"""What a unit costs: counted work, the same on every machine, or measured seconds."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hybrid.models import Unit
from solvers.blocks.norms import frozen_statistics
from solvers.passes.pipeline import Cost

OPERATIONS_A_BYTE = 4.0
"""Floating-point operations that take as long as moving one byte.

Fits ResNet-20 within 8 % and WRN-16-4 within 2 % a residual block on one Zen 3 core
(docs/benchmarks/balance.py); a wrong value shifts the balance of layers that convolve much and
move little against the others.
"""

Measure = Callable[[nn.Module, Tensor, bool], tuple[float, float]]
"""(module, input, whether the input needs a gradient) -> cost of (forward, backward)."""


def unit_costs(
    model: nn.Module, chain: Sequence[Unit], sample: Tensor, measure: Measure
) -> list[Cost]:
    """Cost a sample of a forward and a backward pass of every unit, the model left as it was.

    `sample` is a batch (N, C, H, W); what it costs is divided by N.
    """
    costs: list[Cost] = []
    x = sample
    gradients = [(p, p.grad) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with frozen_statistics(model):
        for i, unit in enumerate(chain):
            module = nn.Sequential(*unit.parts.values())
            forward, backward = measure(module, x, i > 0)
            costs.append(Cost(forward / len(sample), backward / len(sample)))
            with torch.no_grad():
                x = module(x)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return costs


def operations(module: nn.Module, x: Tensor, with_input: bool) -> tuple[float, float]:
    """Floating-point operations, and bytes read and written times `OPERATIONS_A_BYTE`."""
    with FlopCounterMode(display=False) as flops, _Traffic() as traffic:
        out = module(x.detach().requires_grad_(with_input))
        forward = flops.get_total_flops() + OPERATIONS_A_BYTE * traffic.bytes
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        total = flops.get_total_flops() + OPERATIONS_A_BYTE * traffic.bytes
    return forward, total - forward


def seconds(module: nn.Module, x: Tensor, with_input: bool) -> tuple[float, float]:
    """Medians of several passes after warm-up."""
    forwards, backwards = [], []
    for _ in range(7):
        start = _synchronised(x)
        out = module(x.detach().requires_grad_(with_input))
        half = _synchronised(x)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        backwards.append(_synchronised(x) - half)
        forwards.append(half - start)
    return median(forwards[2:]), median(backwards[2:])


class _Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def _synchronised(x: Tensor) -> float:
    """A clock; on one thread the processor's, which does not count who else runs here."""
    if x.is_cuda:
        torch.cuda.synchronize()
        return perf_counter()
    return thread_time() if torch.get_num_threads() == 1 else perf_counter()
