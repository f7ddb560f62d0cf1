"""Units of a block as nodes: what the instances contribute to a unit, and when it steps by that."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.layers.branches import Skippable, nothing_left_out, survival
from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.state import Tensors
from hybrid_messages.by_unit.unit_passes import Gradients, UnitFlight, Units, unit_slices
from hybrid_messages.node import Updates


@dataclass
class Instance(UnitFlight):
    """A micro-batch with a path of its own; without an input before its forward pass."""

    item: int = 0
    """Its number since the last drain."""
    active: frozenset[int] = frozenset()
    """The units of the block that are on its path."""
    updates: list[int] = field(default_factory=list)
    """The number of each unit's steps before its forward pass."""

    def save(self, ages: list[int]) -> None:
        """Put what it needs beside a `UnitFlight` where a checkpoint finds it."""
        self.stash |= {
            "item": torch.tensor(self.item),
            "active": torch.tensor(sorted(self.active), dtype=torch.int64),
            "ages": torch.tensor(ages, dtype=torch.int64),
        }
        tensors = {"labels": self.part.labels, "weight": self.part.weight}
        self.stash |= {name: x for name, x in tensors.items() if x is not None}

    def load(self, stash: Tensors) -> list[int]:
        """Take back what `save` put there."""
        self.item = int(stash["item"])
        self.active = frozenset(stash["active"].tolist())
        labels, weight = stash.get("labels"), stash.get("weight")
        self.part = self.part._replace(labels=labels, weight=weight)
        ages: list[int] = stash["ages"].tolist()
        return ages


class Nodes(Units):
    """Units that step as soon as `frequency` instances have contributed a gradient.

    A module that a path may leave out is a unit by itself. The gradients at hand are sums over the
    samples that contributed, divided by the `size` of a mini-batch; a step is by their mean.
    """

    def __init__(self, block: Block, clip_norm: float, frequency: int, size: int) -> None:
        super().__init__(block, clip_norm, node_slices(block.module))
        self.size = size
        children = [*block.module._modules.values()]
        self.survivals = [survival(children[some.start]) for some in self.slices]
        self.updates = [Updates(frequency) for _ in self.slices]

    def staleness(self) -> Counter[int]:
        """Contributions by the unit's steps since their forward pass, since the last call."""
        late = sum((updates.staleness for updates in self.updates), Counter[int]())
        for updates in self.updates:
            updates.staleness.clear()
        return late

    def step_by_contributions(self, unit: int) -> None:
        """Step by the contributions since the last step, if there are any."""
        updates = self.updates[unit]
        if not updates.contributions:
            return
        if updates.samples != self.size:
            for w in self.parameters[unit].values():
                w.grad = None if w.grad is None else w.grad * (self.size / updates.samples)
        self.step(unit, updates.rate)
        updates.stepped()

    def new_flight(self, part: MicroBatch, lam: Tensor) -> Instance:
        if self.block.draws is not None:
            self.block.draws.draw_for(part.key)
        return Instance(**vars(super().new_flight(part, lam)))

    def forward(self, flight: UnitFlight, unit: int) -> None:
        assert isinstance(flight, Instance)
        flight.updates.append(self.updates[unit].count)
        if unit in flight.active:
            with self._on_path(unit):
                super().forward(flight, unit)
        else:
            self._skip_forward(flight)

    def repeat_forward(self, flight: UnitFlight, unit: int, weights: Tensors) -> None:
        assert isinstance(flight, Instance)
        if unit in flight.active:
            with self._on_path(unit):
                super().repeat_forward(flight, unit, weights)
        else:
            self._skip_forward(flight)

    def backward(self, flight: UnitFlight, unit: int) -> None:
        assert isinstance(flight, Instance)
        if unit == self.count - 1 and self.block.draws is not None:
            self.block.draws.draw_for(flight.part.key)
        if unit in flight.active:
            with self._on_path(unit):
                super().backward(flight, unit)
        else:
            for values in (flight.versions, flight.output_edges, flight.input_edges):
                values.pop()
            flight.units_left = unit

    def _skip_forward(self, flight: Instance) -> None:
        """The forward pass of a unit that is not on the path."""
        flight.versions.append({})
        flight.output_edges.append([])
        flight.input_edges.append(flight.input_edges[-1])

    def _on_path(self, unit: int) -> AbstractContextManager[Any]:
        """Within it the unit runs without a draw: the path has decided."""
        return nothing_left_out() if self.survivals[unit] < 1 else nullcontext()

    def _apply(self, flight: UnitFlight, unit: int, gradients: Gradients) -> None:
        assert isinstance(flight, Instance)
        self.add(unit, gradients)
        samples, rate = flight.part.stop - flight.part.start, flight.part.learning_rate
        trains = any(w.requires_grad for w in self.parameters[unit].values())
        if trains and self.updates[unit].add(flight.updates[unit], samples, rate):
            self.step_by_contributions(unit)

    def save(self, flight: UnitFlight, versions: dict[tuple[int, ...], Tensors]) -> None:
        assert isinstance(flight, Instance)
        if flight.lam is not None:
            super().save(flight, versions)
        # none before its forward pass
        pairs = zip(self.updates, flight.updates, strict=False)
        flight.save([updates.count - before for updates, before in pairs])

    def _without_graph(self, flight: Flight) -> Instance:
        instance = super()._without_graph(flight)
        assert isinstance(instance, Instance)
        pairs = zip(self.updates, instance.load(flight.stash), strict=True)
        instance.updates = [updates.count - age for updates, age in pairs]
        return instance


def node_slices(module: nn.Module) -> list[slice]:
    """The units of a block: runs of its parts, and by itself each that a path may leave out."""
    parts = [*module._modules.values()]
    weighty = [i for i, part in enumerate(parts) if part is not None and [*part.parameters()]]
    starts = {*weighty[:1], *(some.start for some in unit_slices(module))}
    for i, part in enumerate(parts):
        # one that shares a tensor with what is before it begins no run
        if isinstance(part, Skippable) and i in starts:
            starts |= {i + 1} - {len(parts)}
    return [slice(a, b) for a, b in pairwise([*sorted(starts), len(parts)])]
