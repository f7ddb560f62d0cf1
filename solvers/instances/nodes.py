"""Units as nodes: what instances leave in them, and when they step by it."""

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

from solvers.blocks.block import Block
from solvers.blocks.buffers import frozen_statistics, standing_in
from solvers.delayed.base import Flight
from solvers.delayed.units import Gradients, Recomputed, Stashed, Turn, UnitFlight, Units, runs
from solvers.exact.micro_batches import MicroBatch
from solvers.layers.depth import Skippable, decided, survival
from solvers.state import Tensors
from solvers.windows import PhaseStats

_NOTHING: Tensors = {}
"""The weights of a unit that an instance did not go through."""


@dataclass
class Instance(UnitFlight):
    """A micro-batch with a path of its own."""

    item: int = 0
    """Its number since the last drain."""
    active: frozenset[int] = frozenset()
    """The units of the block that it goes through."""
    rate: float = 0.0
    """Learning rate of its mini-batch."""
    seen: list[int] = field(default_factory=list)
    """Updates of each unit when it came up."""


@dataclass
class Tally:
    """What has been added up since a unit's last step, and its steps."""

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

    def settle(
        self, weights: Iterable[nn.Parameter], size: int, step: Callable[[float], None]
    ) -> None:
        """Step by the mean over the samples of the contributions, if there are any.

        The gradients at hand are sums of the samples' over `size`, those of a mini-batch.
        """
        if not self.contributions:
            return
        if self.samples != size:
            for w in weights:
                w.grad = None if w.grad is None else w.grad * (size / self.samples)
        step(self.rate)
        self.contributions = self.samples = 0
        self.updates += 1

    def kept(self) -> list[float]:
        """For a checkpoint."""
        return [self.contributions, self.samples, self.rate]

    @classmethod
    def of(cls, kept: Sequence[float]) -> Tally:
        """What gave `kept`; its steps are counted from here."""
        return cls(int(kept[0]), int(kept[1]), kept[2])


class Nodes(Units):
    """Units that step when `frequency` instances have gone through them and come home.

    A module that may be left out is a unit by itself.
    """

    def __init__(self, block: Block, clip_norm: float, frequency: int, size: int) -> None:
        super().__init__(block, clip_norm, divided(block.module))
        self.frequency, self.size = frequency, size
        children = [*block.module._modules.values()]
        self.survivals = [survival(children[some.start]) for some in self.slices]
        self.tallies = [Tally() for _ in self.slices]
        self.trained = [any(w.requires_grad for w in own.values()) for own in self.parameters]
        self.late: Counter[int] = Counter()
        """Of how many contributions to a unit, by its updates since they came up."""

    def tell(self, stats: PhaseStats) -> None:
        """Say how late contributions came, once."""
        stats.staleness += self.late
        self.late.clear()

    def settle(self, unit: int) -> None:
        """Step by what there is, if there is anything."""
        weights = self.parameters[unit].values()
        self.tallies[unit].settle(weights, self.size, lambda rate: self._step(unit, rate))

    def begin(self, part: MicroBatch, lam: Tensor) -> Instance:
        if self.block.draws is not None:
            self.block.draws.draw_for(part.key)
        return Instance(**vars(super().begin(part, lam)))

    def up(self, flight: UnitFlight, unit: int, turn: Turn) -> None:
        assert isinstance(flight, Instance)
        flight.seen.append(self.tallies[unit].updates)
        if unit not in flight.active:
            self._past(flight, unit)
            return
        with self._whole(unit):
            super().up(flight, unit, turn)  # type: ignore[safe-super]

    def down(self, flight: UnitFlight, unit: int, rate: float, turn: Turn) -> None:
        assert isinstance(flight, Instance)
        if unit == self.count - 1 and self.block.draws is not None:
            self.block.draws.draw_for(flight.part.key)
        if unit not in flight.active:
            self._back_past(flight, unit)
            flight.left = unit
            return
        with self._whole(unit):
            super().down(flight, unit, rate, turn)  # type: ignore[safe-super]

    @abstractmethod
    def _past(self, flight: Instance, unit: int) -> None:
        """Go up without the unit."""

    @abstractmethod
    def _back_past(self, flight: Instance, unit: int) -> None:
        """Come home without it."""

    def _whole(self, unit: int) -> AbstractContextManager[Any]:
        """Within it the unit runs: its path has decided."""
        return decided() if self.survivals[unit] < 1 else nullcontext()

    def _land(self, flight: UnitFlight, unit: int, gradients: Gradients, rate: float) -> None:
        assert isinstance(flight, Instance)
        self._add(unit, gradients)
        tally = self.tallies[unit]
        tally.add(flight.part, rate)
        if self.trained[unit]:
            self.late[tally.updates - flight.seen[unit]] += 1
        if tally.contributions >= self.frequency:
            self.settle(unit)

    def _kept(self, flight: UnitFlight) -> Tensors:
        assert isinstance(flight, Instance)
        ages = [t.updates - seen for t, seen in zip(self.tallies, flight.seen, strict=True)]
        return super()._kept(flight) | {
            "item": torch.tensor(flight.item),
            "active": torch.tensor(sorted(flight.active), dtype=torch.int64),
            "rate": torch.tensor(flight.rate, dtype=torch.float64),
            "ages": torch.tensor(ages),
        }

    def _given_back(self, flight: Flight) -> Instance:
        made, stash = super()._given_back(flight), flight.stash
        assert isinstance(made, Instance)
        made.item, made.rate = int(stash["item"]), float(stash["rate"])
        made.active = frozenset(stash["active"].tolist())
        updates = [tally.updates for tally in self.tallies]
        ages = stash["ages"].tolist()
        made.seen = [now - age for now, age in zip(updates, ages, strict=True)]
        return made


class StashedNodes(Nodes, Stashed):
    """Keep every graph, over the versions of the weights that it met."""

    def _past(self, flight: Instance, unit: int) -> None:
        flight.versions.append(_NOTHING)
        flight.outs.append([])
        flight.ins.append(flight.ins[-1])

    def _back_past(self, flight: Instance, unit: int) -> None:
        flight.versions.pop()
        flight.outs.pop()
        del flight.ins[unit + 1 :]

    def again(self, flight: Flight) -> Instance:
        made, weights = self._given_back(flight), flight.weights or {}
        module = self.block.module
        with frozen_statistics(module), standing_in(module, made.buffers):
            for unit, own in enumerate(self.parameters):
                if unit not in made.active:
                    self._past(made, unit)
                    continue
                made.versions.append(
                    {n: weights[n].requires_grad_(own[n].requires_grad) for n in own}
                )
                with self._whole(unit):
                    self._run(made, unit)
                self._opened(made, unit)
        made.value = None
        return made


class RecomputedNodes(Nodes, Recomputed):
    """Keep what went into the units, and run them again with the weights they have by then."""

    def _past(self, flight: Instance, unit: int) -> None:
        flight.inputs.append(flight.value)

    def _back_past(self, flight: Instance, unit: int) -> None:
        flight.inputs.pop()


def divided(module: nn.Module) -> list[slice]:
    """The units of a block: runs of its parts, and what may be left out by itself."""
    parts = [*module._modules.values()]
    weighty = [i for i, part in enumerate(parts) if part is not None and [*part.parameters()]]
    starts = {*weighty[:1], *(some.start for some in runs(module))}
    for i, part in enumerate(parts):
        # one that shares a tensor with what is before it begins no run
        if isinstance(part, Skippable) and i in starts:
            starts |= {i + 1} - {len(parts)}
    return [slice(a, b) for a, b in pairwise([*sorted(starts), len(parts)])]
