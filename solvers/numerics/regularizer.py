"""A regularizer: a term of the loss that depends on each block's weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Mapping[str, Tensor]], Any]
"""{name in the network: weight} -> a term of the loss, a tensor of one number."""


class Regularizer:
    r"""The term sum_k r(w_k) of the loss phi(f(x; w), y) + sum_k r(w_k), for one block k.

    Its gradient is added once per step, after sums over replicas and over copies of a weight.
    """

    def __init__(self, function: Function, weights: Mapping[str, nn.Parameter]) -> None:
        self.function = function
        once = {id(p): (name, p) for name, p in weights.items() if p.requires_grad}
        self.weights = dict(once.values())

    def add_gradient(self, scale: float, only: Sequence[Tensor] | None = None) -> None:
        """Add `scale` times the term's gradient to all weights, or `only` to some of them."""
        chosen = None if only is None else {id(p) for p in only}
        named = {n: p for n, p in self.weights.items() if chosen is None or id(p) in chosen}
        value = self.function(named) if named else 0.0
        if not isinstance(value, Tensor) or not value.requires_grad:
            return
        gradients = torch.autograd.grad(value * scale, [*named.values()], allow_unused=True)
        for p, gradient in zip(named.values(), gradients, strict=True):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad + gradient
