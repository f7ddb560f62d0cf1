"""Replicas of a layer: copies that take turns with its messages and average their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from hybrid_messages.control import Cond, Phi
from hybrid_messages.layer import Layer
from hybrid_messages.node import Node

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def replicated(
    name: str,
    module: nn.Module,
    optimizer: MakeOptimizer,
    ways: int,
    min_update_frequency: int = 1,
    average_every: int = 1,
    choose: Callable[[Any], int] | None = None,
) -> tuple[dict[str, Node], list[tuple[str, str]]]:
    r"""Nodes and edges of `ways` copies of one layer, for a graph's: messages enter at `name`.

        name (Cond) -> name.0 | name.1 | ... -> name.out (Phi)

        w_r <- step of replica r, as of any layer
        every ways * average_every steps of them all:   w_1, ..., w_R <- (w_1 + ... + w_R) / R

    A message goes to replica `choose(state)`, or (instance modulo ways), and comes back by it. The
    state of each copy's optimizer is its own. At the end of a run all have the mean, `module` too,
    which is the first copy. Following Gaunt et al., arXiv 1705.09786.

    Where one instance is active at a time and the optimizer is plain SGD, replicas that take turns
    and average after every step are one layer with `ways` times the min_update_frequency.
    """
    for setting, value in (("ways", ways), ("average_every", average_every)):
        if value < 1:
            raise ValueError(f"{setting} is {value}; it must be at least 1")
    modules = [module, *(deepcopy(module) for _ in range(ways - 1))]
    mean = _Mean(average_every)
    mean.replicas = [
        Replica(each, optimizer(each.parameters()), min_update_frequency, mean) for each in modules
    ]
    nodes: dict[str, Node] = {
        name: Cond(choose or (lambda state: state.instance % ways), ways),
        **{f"{name}.{way}": replica for way, replica in enumerate(mean.replicas)},
        f"{name}.out": Phi(ways),
    }
    edges = [
        edge
        for way in range(ways)
        for edge in ((f"{name}:{way}", f"{name}.{way}"), (f"{name}.{way}", f"{name}.out:{way}"))
    ]
    return nodes, edges


class _Mean:
    """When the weights of replicas become their mean."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.replicas: list[Replica] = []
        self.count = self.steps = 0
        """Means so far, and the replicas' steps since."""

    def stepped(self) -> None:
        self.steps += 1
        if self.steps >= self.every * len(self.replicas):
            self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Average what has moved, in the order of the replicas."""
        if not self.steps:
            return
        for weights in zip(*(each.module.parameters() for each in self.replicas), strict=True):
            mean = torch.stack(weights).mean(0)
            for weight in weights:
                weight.copy_(mean)
        self.steps, self.count = 0, self.count + 1


class Replica(Layer):
    """One of the layers of `replicated`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        min_update_frequency: int,
        mean: _Mean,
    ) -> None:
        super().__init__(module, optimizer, min_update_frequency)
        self._mean = mean

    @property
    def version(self) -> int:
        return self.updates + self._mean.count

    def drain(self) -> None:
        super().drain()
        if not any(each._updates.contributions for each in self._mean.replicas):
            self._mean.take()

    def clear(self) -> None:
        super().clear()
        self._mean.take()

    def _step(self) -> None:
        super()._step()
        self._mean.stepped()
