"""Nodes that compute: a module with an optimizer of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_messages.node import Cache, Message, Node, Updates


class _Cached(NamedTuple):
    """What a forward message met: its payload, what became of it, updates and weights so far."""

    x: Tensor
    y: Tensor
    updates: int
    version: int


class Layer(Node):
    r"""A module f( . ; w) and its optimizer, which steps by itself.

        forward(i, x):    cache[i] <- x;  send f(x; w)
        backward(i, dy):  (dx, dw) <- vjp of f at (cache.pop(i), w);  send dx;  acc += dw;  c += 1
                          if c >= min_update_frequency:  w <- step with acc / c;  acc, c <- 0

    w in a vjp are the weights of that moment: where they are still those of the forward pass its
    graph is taken, otherwise f runs again. A payload is one sample, with no batch dimension unless
    the user gives it one. A remainder is applied at the end of a run, divided by its own count.

    Following Gaunt et al., arXiv 1705.09786, section 3.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        min_update_frequency: int = 1,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        _check_repeatable(module)
        _check_optimized(self.parameters, optimizer)
        self._updates = Updates(min_update_frequency)
        self._cache: Cache[_Cached] = Cache()

    @property
    def updates(self) -> int:
        """Steps of its optimizer."""
        return self._updates.count

    @property
    def version(self) -> int:
        """Changes of its weights."""
        return self.updates

    @property
    def staleness(self) -> Counter[int]:
        """Messages by the updates between their forward and their backward pass."""
        return self._updates.staleness

    def forward(self, message: Message, learn: bool) -> list[Message]:
        _, state, payload = message
        if not learn:
            with torch.no_grad():
                return [Message(0, state, self.module(payload))]
        x, y = self._run(payload)
        self._cache.put(state, _Cached(x, y, self.updates, self.version))
        return [Message(0, state, y.detach())]

    def backward(self, message: Message) -> list[Message]:
        _, state, gradient = message
        x, y, updates, version = self._cache.pop(state)
        if version != self.version:
            x, y = self._run(x)
        if y.requires_grad:
            torch.autograd.backward([y], [gradient])
        if self._updates.add(updates):
            self._step()
        # of indices: nothing, but a message all the same, for those that wait for it
        return [Message(0, state, gradient.new_zeros(x.shape) if x.grad is None else x.grad)]

    def drain(self) -> None:
        """The end of a run: steps with what is left over."""
        if self._updates.contributions:
            self._step()

    def clear(self) -> None:
        super().clear()
        self._updates.contributions = 0
        for parameter in self.parameters:
            parameter.grad = None

    def _run(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        x = payload.detach()
        if x.is_floating_point():
            x.requires_grad_()
        with torch.enable_grad():
            return x, self.module(x)

    def _step(self) -> None:
        count = self._updates.contributions
        if self.optimizer is None:
            self._updates.contributions = 0
            return
        for parameter in self.parameters:
            if parameter.grad is not None and count > 1:
                parameter.grad /= count
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._updates.stepped()


def _check_repeatable(module: nn.Module) -> None:
    for name, each in module.named_modules():
        draws = isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0
        if draws or isinstance(each, nn.modules.batchnorm._NormBase):
            raise ValueError(
                f"{type(each).__name__}{f' {name!r}' if name else ''} cannot be in a layer, which"
                " may run twice for one message and sees one sample at a time: take LayerNorm or"
                " GroupNorm, or none"
            )


def _check_optimized(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer | None) -> None:
    groups = optimizer.param_groups if optimizer else []
    held = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    if held != {id(p) for p in parameters}:
        raise ValueError(
            f"the module has {len(parameters)} parameters to train and its optimizer holds"
            f" {len(held)}, which must be the same: give every layer an optimizer of its own"
            " module's parameters, or requires_grad_(False) to a module that is not trained"
        )
