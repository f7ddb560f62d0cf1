"""Steps of torch's optimizers on slices of large parameters, whose temporary tensors are small.

Adam's sqrt(v) / c + eps needs two tensors of a parameter's size: as much as both moments of an
embedding. Where an update computes each number from those at its place alone, a step on slices has
the same bits.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from hybrid.solvers.numerics.optimizer_state import parameters_of, restrict_to, with_groups

SLICE = 1 << 22
"""Numbers of a slice, a multiple of what torch gives to a thread and to a register."""
ELEMENTWISE = frozenset(
    {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop}
)
"""The classes whose updates are by place."""
FORMATS = torch.float32, torch.float64
"""Others are rounded in another way at the end of a thread's share than within it."""
_WHOLE = "foreach", "fused", "capturable", "differentiable"
"""Settings of a group that choose other code, which takes whole tensors."""


def step(optimizer: optim.Optimizer) -> None:
    """`optimizer.step()`, on slices of its large parameters where that is the same."""
    large = [p for p in parameters_of([optimizer]) if p.numel() > SLICE and p.grad is not None]
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    plain = type(optimizer) in ELEMENTWISE and not hooked and "step" not in vars(optimizer)
    sliced = {id(p) for p in large if plain and _is_sliced(p, optimizer.state.get(p, {}))}
    if any(group.get(name) for group in optimizer.param_groups for name in _WHOLE) or not sliced:
        optimizer.step()
        return
    restrict_to([p for p in parameters_of([optimizer]) if id(p) not in sliced], optimizer).step()
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if id(p) in sliced):
            _step_on_slices(optimizer, group, p)


def _is_sliced(p: Tensor, state: Mapping[str, Any]) -> bool:
    of_numbers = [p, p.grad, *(x for x in state.values() if _is_like(x, p))]
    return all(x.is_cpu and x.is_contiguous() and x.dtype in FORMATS for x in of_numbers)


def _is_like(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape


def _step_on_slices(optimizer: optim.Optimizer, group: dict[str, Any], p: Tensor) -> None:
    """Step p slice by slice, each with its part of the state and a copy of what is one number."""
    assert p.grad is not None
    state, before = optimizer.state[p], dict(optimizer.state[p])
    for begin in range(0, p.numel(), SLICE):
        part = slice(begin, begin + SLICE)
        piece = nn.Parameter(p.detach().view(-1)[part])
        piece.grad = p.grad.view(-1)[part]
        own = {
            slot: x.view(-1)[part] if _is_like(x, p) else x.clone() if torch.is_tensor(x) else x
            for slot, x in before.items()
        }
        copy = with_groups([{**group, "params": [piece]}], optimizer)
        copy.state = defaultdict(dict, {piece: own})
        copy.step()
        for slot, x in copy.state[piece].items():
            if not _is_like(x, piece):
                state[slot] = x
                continue
            if not _is_like(state.get(slot), p):
                state[slot] = torch.empty(p.shape, dtype=x.dtype)
            if (target := state[slot].view(-1)[part]).data_ptr() != x.data_ptr():
                target.copy_(x)
