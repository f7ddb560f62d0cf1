"""A model cut into blocks, and what a run needs to know of them: costs, shapes, random draws."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.networks.costs import count_costs, merge_packed_units
from hybrid.networks.segments import number_module_calls
from hybrid.networks.units import BlockModule, Chain, Unit, make_single_unit_blocks, mode
from hybrid.solvers.base import Shape
from hybrid.solvers.exact.gaps import Cost
from hybrid.solvers.layers.bundle import Bundle, call_network
from hybrid.solvers.numerics.draws import find_random_parts

SAMPLES = 32
"""Batch size for the units' cost: weights are read once for each batch."""
MOST_OF_ALL = 0.95
"""Share of the cost from which one block is said to have nearly all of it."""


@dataclass
class Blocks:
    """A model cut into blocks: block k runs units starts[k] .. starts[k+1]-1."""

    model: nn.Module
    units: list[Unit]
    starts: list[int]
    costs: list[Cost] = field(default_factory=list)
    """The cost of each unit for one sample, as it was balanced; empty for explicit cuts."""

    def __len__(self) -> int:
        return len(self.starts)

    def __str__(self) -> str:
        """One line for each block: its units, its parameters and, if known, its cost share."""
        lines, shares = [], self._shares
        for k, name in enumerate(self._names):
            parts = [m for unit in self.units_of(k) for m in unit.parts.values()]
            count = sum(p.numel() for m in parts for p in m.parameters())
            share = f", {shares[k]:.0%} of the cost" if shares else ""
            lines.append(f"block {k}: {name}, {count:,} parameters{share}")
        return "\n".join([*lines, *self.notices])

    @property
    def _names(self) -> list[str]:
        runs = [self.units_of(k) for k in range(len(self))]
        return [f"{run[0].name} to {run[-1].name}" for run in runs]

    @property
    def notices(self) -> list[str]:
        """A message for the user if one block is known to have nearly all of the cost."""
        shares = self._shares
        most = max(shares, default=0.0)
        if len(shares) < 2 or most <= MOST_OF_ALL:
            return []
        number = shares.index(most)
        return [
            f"block {number} ({self._names[number]}) has {most:.0%} of the cost, so {len(shares)} "
            "blocks are hardly faster than one: give its modules as units, or take one block"
        ]

    @property
    def _shares(self) -> list[float]:
        """Each block's share of the cost; empty if it is not known."""
        total = sum(map(sum, self.costs))
        return [sum(cost) / total for cost in self.block_costs()] if total else []

    @property
    def cuts(self) -> list[str]:
        """The first unit of every block but the first."""
        return [self.units[start].name for start in self.starts[1:]]

    def units_of(self, index: int) -> list[Unit]:
        """The units of block `index`."""
        ends = [*self.starts[1:], len(self.units)]
        return self.units[self.starts[index] : ends[index]]

    def module(self, index: int) -> BlockModule:
        """Block `index` as one module, sharing the model's parameters."""
        after = self.units[self.starts[index + 1]] if index + 1 < len(self) else None
        return BlockModule(self.units_of(index), after)

    @property
    def bundled(self) -> bool:
        """Whether the input of some block is several tensors."""
        return any(self.units[start].bundle for start in self.starts)

    @property
    def packed_cuts(self) -> frozenset[int]:
        """The cuts that several tensors cross."""
        bundles = [self.units[start].bundle for start in self.starts]
        return frozenset(k for k, bundle in enumerate(bundles) if k and bundle is not None)

    def cuts_changed_by(self, number_format: str) -> list[str]:
        """The cuts where a number format would change the integers that cross them."""
        behind = [self.units[start] for start in self.starts[1:]]
        return [u.name for u in behind if u.bundle and not u.bundle.survives(number_format)]

    def pack_inputs(self, inputs: Any) -> Tensor:
        """A batch of the network's inputs as the one tensor that the first block takes."""
        bundle = self.units[0].bundle
        packed: Tensor = inputs if bundle is None else bundle.pack(inputs)
        return packed.to(self._device)

    def block_costs(self, inputs: Any = None) -> list[Cost]:
        """Cost of each block for one sample; counted operations if nothing was balanced.

        `inputs` is a batch of the network's inputs, as for `with_bundles`.
        """
        pieces, costs = [self.units_of(k) for k in range(len(self))], self.costs
        if not costs:
            inputs = default_sample(self.model, inputs)
            made = self.with_bundles(inputs)
            pieces = [merge_packed_units(made.units_of(k)) for k in range(len(made))]
            whole = [unit for piece in pieces for unit in piece]
            costs = count_costs(self.model, whole, made.pack_inputs(inputs))
        each = iter(costs)
        runs = [[*islice(each, len(own))] for own in pieces]
        return [Cost(*(sum(part) for part in zip(*run, strict=True))) for run in runs]

    def with_bundles(self, inputs: Any) -> Blocks:
        """The same blocks, whose units know how their input tensors are packed.

        `inputs` is a batch of the network's inputs: a tensor, a tuple by position, a dict by name.
        Raises ValueError if the model does not take it, or if anything but tensors with one row for
        each sample would cross a cut.
        """
        value, units = tree_map(lambda x: x[:2].to(self._device), inputs), []
        count = len(tree_leaves(value)[0])
        bundle = None if isinstance(value, Tensor) else Bundle.of(value, count, "an input")
        with mode(self.model, training=False), torch.no_grad():
            for i, unit in enumerate(self.units):
                if i:
                    bundle = Bundle.of(value, count, f"what goes into {unit.name}")
                units.append(replace(unit, bundle=bundle, begins=i == 0))
                try:
                    value = _run_unit(unit, value, begins=i == 0)
                except Exception as error:  # whatever a forward does with what it does not expect
                    shapes = ", ".join(str(tuple(x.shape[1:])) for x in tree_leaves(inputs))
                    raise ValueError(
                        f"inputs of shape {shapes} do not fit the model: unit {unit.name} says: "
                        f"{(str(error).splitlines() or ['nothing'])[0]}"
                    ) from None
        return replace(self, units=units)

    def compute_outputs(self, inputs: Any) -> Any:
        """The network's outputs for a batch of inputs, in evaluation mode, on the CPU."""
        value = tree_map(lambda x: x.to(self._device), inputs)
        with mode(self.model, training=False), torch.no_grad():
            for i, unit in enumerate(self.units):
                value = _run_unit(unit, value, begins=i == 0)
        return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, value)

    @property
    def _device(self) -> torch.device:
        """The device of the model: a GPU, after a training there."""
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def cut_shapes(self, sample: Tensor) -> list[Shape]:
        """One sample's shape at every cut; `sample` is a batch (N, ...) of at least one.

        Raises ValueError if the model does not take it.
        """
        shapes: list[Shape] = []
        with mode(self.model, training=False), torch.no_grad():
            x = sample[:1]
            for index in range(len(self) - 1):
                try:
                    x = self.module(index)(x)
                except RuntimeError as error:
                    names = f"{self.units_of(index)[0].name}..{self.units_of(index)[-1].name}"
                    raise ValueError(
                        f"images of shape {tuple(sample.shape[1:])} do not fit the model: "
                        f"units {names} say: {str(error).splitlines()[0]}"
                    ) from None
                shapes.append(tuple(x.shape[1:]))
        return shapes

    def find_random_modules(self, sample: Tensor) -> list[dict[nn.Module, tuple[int, ...]]]:
        """For each block, the modules that draw random numbers in training, with numbers.

        The numbers distinguish their draws. They are that of the unit or, for a module that a graph
        calls, the places of the calls there; they do not depend on the cuts.
        """
        found: list[dict[nn.Module, tuple[int, ...]]] = [{} for _ in self.starts]
        x = sample[:2]  # two, because BatchNorm needs more than one value for each channel
        with mode(self.model, training=True), torch.no_grad():
            for i, module in enumerate(make_single_unit_blocks(self.units)):
                parts = [*module.children()]
                known: dict[nn.Module, tuple[int, ...]] = dict.fromkeys(parts, (i,))
                for part in parts:
                    known |= number_module_calls(part) if isinstance(part, fx.GraphModule) else {}
                draws, x = find_random_parts(module, known, x)
                block = found[bisect_right(self.starts, i) - 1]
                block |= {part: (*block.get(part, ()), *known[part]) for part in draws}
        return found


def _run_unit(unit: Unit, value: Any, begins: bool) -> Any:
    """The outputs of a unit for its inputs; `begins`: these are the network's own."""
    for i, part in enumerate(unit.parts.values()):
        value = call_network(part, value) if begins and i == 0 else part(value)
    return value


def default_sample(model: nn.Module, sample: Any) -> Any:
    """A batch to run the units on."""
    if sample is not None:
        return sample
    if not isinstance(model, Chain):
        raise ValueError(
            "costs need sample=, a batch of inputs to run the units on; "
            "or give cuts=, or balance='even'"
        )
    x = torch.randn(SAMPLES, *model.input_shape, generator=torch.Generator().manual_seed(0))
    return x.to(memory_format=torch.channels_last)
