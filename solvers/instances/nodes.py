"""Units as nodes: what the instances contribute to a unit, and when it steps by that."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.blocks.block import Block
from hybrid.solvers.delayed.edges import Gradients
from hybrid.solvers.delayed.flights import Flight
from hybrid.solvers.delayed.units import (
    Recomputed,
    Stashed,
    UnitFlight,
    UnitLock,
    Units,
    unit_slices,
)
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.layers.depth import Skippable, nothing_left_out, survival
from hybrid.solvers.state import Tensors
from hybrid.solvers.windows import PhaseStats

_NO_WEIGHTS: Tensors = {}
"""The weights of a unit that an instance's path leaves out."""


@dataclass
class Instance(UnitFlight):
    """A micro-batch with a path of its own."""

    item: int = 0
    """Its number since the last drain."""
    active: frozenset[int] = frozenset()
    """The units of the block that are on its path."""
    rate: float = 0.0
    """Learning rate of its mini-batch."""
    updates: list[int] = field(default_factory=list)
    """The number of each unit's steps before its forward pass."""


@dataclass
class Tally:
    """The contributions to a unit since its last step, and the number of its steps."""

    contributions: int = 0
    samples: int = 0
    rate: float = 0.0
    """Of the newest contribution."""
    updates: int = 0

    def add(self, part: MicroBatch, rate: float) -> None:
        """Count an instance."""
        self.contributions += 1
        self.samples += part.stop - part.start
        self.rate = rate

    def step(
        self, weights: Iterable[nn.Parameter], size: int, step: Callable[[float], None]
    ) -> None:
        """Step by the mean over the samples of the contributions, if there are any.

        The gradients at hand are sums over these samples, divided by the mini-batch's `size`.
        """
        if not self.contributions:
            return
        if self.samples != size:
            for w in weights:
                w.grad = None if w.grad is None else w.grad * (size / self.samples)
        step(self.rate)
        self.contributions = self.samples = 0
        self.updates += 1

    def numbers(self) -> list[float]:
        """For a checkpoint."""
        return [self.contributions, self.samples, self.rate]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Tally:
        """The tally that gave these `numbers`; its steps are counted from here."""
        return cls(int(numbers[0]), int(numbers[1]), numbers[2])


class Nodes(Units):
    """Units that step as soon as `frequency` instances have contributed a gradient.

    A module that a path may leave out is a unit by itself.
    """

    def __init__(self, block: Block, clip_norm: float, frequency: int, size: int) -> None:
        super().__init__(block, clip_norm, node_slices(block.module))
        self.frequency, self.size = frequency, size
        children = [*block.module._modules.values()]
        self.survivals = [survival(children[some.start]) for some in self.slices]
        self.tallies = [Tally() for _ in self.slices]
        self.trained = [any(w.requires_grad for w in own.values()) for own in self.parameters]
        self.staleness: Counter[int] = Counter()
        """Contributions by the unit's steps since their forward pass."""

    def report_staleness(self, stats: PhaseStats) -> None:
        """Move the counts to `stats`."""
        stats.staleness += self.staleness
        self.staleness.clear()

    def step(self, unit: int) -> None:
        """Step by the contributions since the last step, if there are any."""
        weights = self.parameters[unit].values()
        self.tallies[unit].step(weights, self.size, lambda rate: self._step(unit, rate))

    def new_flight(self, part: MicroBatch, lam: Tensor) -> Instance:
        if self.block.draws is not None:
            self.block.draws.draw_for(part.key)
        return Instance(**vars(super().new_flight(part, lam)))

    def forward(self, flight: UnitFlight, unit: int, lock: UnitLock) -> None:
        assert isinstance(flight, Instance)
        flight.updates.append(self.tallies[unit].updates)
        if unit not in flight.active:
            self._skip_forward(flight)
            return
        with self._on_path(unit):
            super().forward(flight, unit, lock)  # type: ignore[safe-super]

    def backward(self, flight: UnitFlight, unit: int, rate: float, lock: UnitLock) -> None:
        assert isinstance(flight, Instance)
        if unit == self.count - 1 and self.block.draws is not None:
            self.block.draws.draw_for(flight.part.key)
        if unit not in flight.active:
            self._skip_backward(flight)
            flight.units_left = unit
            return
        with self._on_path(unit):
            super().backward(flight, unit, rate, lock)  # type: ignore[safe-super]

    @abstractmethod
    def _skip_forward(self, flight: Instance) -> None:
        """The forward pass of a unit that is not on the path."""

    @abstractmethod
    def _skip_backward(self, flight: Instance) -> None:
        """The backward pass of a unit that is not on the path."""

    def _on_path(self, unit: int) -> AbstractContextManager[Any]:
        """Within it the unit runs without a draw: the path has decided."""
        return nothing_left_out() if self.survivals[unit] < 1 else nullcontext()

    def _apply(self, flight: UnitFlight, unit: int, gradients: Gradients, rate: float) -> None:
        assert isinstance(flight, Instance)
        self._add(unit, gradients)
        tally = self.tallies[unit]
        tally.add(flight.part, rate)
        if self.trained[unit]:
            self.staleness[tally.updates - flight.updates[unit]] += 1
        if tally.contributions >= self.frequency:
            self.step(unit)

    def save(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        assert isinstance(flight, Instance)
        super().save(flight, known)
        pairs = zip(self.tallies, flight.updates, strict=True)
        flight.stash |= {
            "item": torch.tensor(flight.item),
            "active": torch.tensor(sorted(flight.active), dtype=torch.int64),
            "rate": torch.tensor(flight.rate, dtype=torch.float64),
            "ages": torch.tensor([tally.updates - before for tally, before in pairs]),
        }

    def _from_checkpoint(self, flight: Flight) -> Instance:
        made, stash = super()._from_checkpoint(flight), flight.stash
        assert isinstance(made, Instance)
        made.item, made.rate = int(stash["item"]), float(stash["rate"])
        made.active = frozenset(stash["active"].tolist())
        ages = stash["ages"].tolist()
        made.updates = [t.updates - age for t, age in zip(self.tallies, ages, strict=True)]
        return made


class StashedNodes(Nodes, Stashed):
    """Keep every graph, over the versions of the weights that the forward passes used."""

    def _skip_forward(self, flight: Instance) -> None:
        flight.versions.append(_NO_WEIGHTS)
        flight.output_edges.append([])
        flight.input_edges.append(flight.input_edges[-1])

    def _skip_backward(self, flight: Instance) -> None:
        flight.versions.pop()
        flight.output_edges.pop()
        flight.input_edges.pop()

    def _repeat_forward(self, flight: UnitFlight, unit: int, weights: Tensors) -> None:
        assert isinstance(flight, Instance)
        if unit not in flight.active:
            self._skip_forward(flight)
            return
        with self._on_path(unit):
            super()._repeat_forward(flight, unit, weights)


class RecomputedNodes(Nodes, Recomputed):
    """Keep the inputs of the units, and run them again with their newest weights."""

    def _skip_forward(self, flight: Instance) -> None:
        flight.inputs.append(flight.value)

    def _skip_backward(self, flight: Instance) -> None:
        flight.inputs.pop()


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
