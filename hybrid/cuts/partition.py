"""A model cut into blocks: evenly, by counted operations, by measured time, or by given cuts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.cuts.balance import balanced_starts, imbalance_notices
from hybrid.cuts.costs import counted_costs, measured_costs, merge_packed, merged
from hybrid.cuts.given import check, check_inside, cut_indices, units_of_list
from hybrid.cuts.modules import BlockModule, check_shared, single_unit_blocks
from hybrid.cuts.segments import Graph, module_calls
from hybrid.errors import no_exit, one_line
from hybrid.models import Chain, Unit, is_sequence, mode, units
from solvers.base import Shape
from solvers.blocks.draws import find_random_parts
from solvers.exact.pipeline import Cost
from solvers.layers.bundle import Bundle, call_network

UNEVEN = 1.2
"""Largest cost of a block over the mean at which only single tensors cross cuts."""
UNEVEN_INSIDE = 1.02
"""The same if cuts inside units are allowed."""
SAMPLES = 32
"""Batch size for the units' cost: weights are read once for each batch."""


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
            parts = [m for unit in self.of(k) for m in unit.parts.values()]
            count = sum(p.numel() for m in parts for p in m.parameters())
            share = f", {shares[k]:.0%} of the cost" if shares else ""
            lines.append(f"block {k}: {name}, {count:,} parameters{share}")
        return "\n".join([*lines, *self.notices])

    @property
    def _names(self) -> list[str]:
        runs = [self.of(k) for k in range(len(self))]
        return [f"{run[0].name} to {run[-1].name}" for run in runs]

    @property
    def notices(self) -> list[str]:
        """Messages for the user about the cuts, if their cost is known."""
        return imbalance_notices(self._names, self._shares)

    @property
    def _shares(self) -> list[float]:
        """Each block's share of the cost; empty if it is not known."""
        total = sum(map(sum, self.costs))
        return [sum(cost) / total for cost in self.block_costs()] if total else []

    @property
    def cuts(self) -> list[str]:
        """The first unit of every block but the first."""
        return [self.units[start].name for start in self.starts[1:]]

    def of(self, index: int) -> list[Unit]:
        """The units of block `index`."""
        ends = [*self.starts[1:], len(self.units)]
        return self.units[self.starts[index] : ends[index]]

    def module(self, index: int) -> BlockModule:
        """Block `index` as one module, sharing the model's parameters."""
        after = self.units[self.starts[index + 1]] if index + 1 < len(self) else None
        return BlockModule(self.of(index), after)

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

    def packed(self, inputs: Any) -> Tensor:
        """A batch of the network's inputs as the one tensor that the first block takes."""
        bundle = self.units[0].bundle
        packed: Tensor = inputs if bundle is None else bundle.pack(inputs)
        return packed.to(self._device)

    def block_costs(self, inputs: Any = None) -> list[Cost]:
        """Cost of each block for one sample; counted operations if nothing was balanced.

        `inputs` is a batch of the network's inputs, as for `fitted`.
        """
        pieces, costs = [self.of(k) for k in range(len(self))], self.costs
        if not costs:
            inputs = default_sample(self.model, inputs)
            made = self.fitted(inputs)
            pieces = [merge_packed(made.of(k)) for k in range(len(made))]
            whole = [unit for piece in pieces for unit in piece]
            costs = counted_costs(self.model, whole, made.packed(inputs))
        each = iter(costs)
        runs = [[*islice(each, len(own))] for own in pieces]
        return [Cost(*(sum(part) for part in zip(*run, strict=True))) for run in runs]

    def fitted(self, inputs: Any) -> Blocks:
        """The same blocks, whose units know how their input tensors are packed.

        `inputs` is a batch of the network's inputs: a tensor, a tuple by position, a dict by name.
        Raises ValueError if the model does not take it, or if anything but tensors with one row for
        each sample would cross a cut.
        """
        value, units = tree_map(lambda x: x[:2].to(self._device), inputs), []
        count = len(tree_leaves(value)[0])
        single = isinstance(value, Tensor)
        bundle = None if single else Bundle.of(value, count, "an input")
        with mode(self.model, training=False), torch.no_grad():
            for i, unit in enumerate(self.units):
                if i:
                    bundle = Bundle.of(value, count, f"what goes into {unit.name}")
                units.append(replace(unit, bundle=bundle, begins=i == 0))
                try:
                    for j, part in enumerate(unit.parts.values()):
                        value = part(value) if i or j else call_network(part, value)
                except Exception as error:  # whatever a forward does with what it does not expect
                    shapes = ", ".join(str(tuple(x.shape[1:])) for x in tree_leaves(inputs))
                    raise ValueError(
                        f"inputs of shape {shapes} do not fit the model: unit {unit.name} says: "
                        f"{(str(error).splitlines() or ['nothing'])[0]}"
                    ) from None
        return replace(self, units=units)

    def outputs(self, inputs: Any) -> Any:
        """The network's outputs for a batch of inputs, in evaluation mode, on the CPU."""
        value = tree_map(lambda x: x.to(self._device), inputs)
        with mode(self.model, training=False), torch.no_grad():
            for i, unit in enumerate(self.units):
                for j, part in enumerate(unit.parts.values()):
                    value = part(value) if i or j else call_network(part, value)
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
                    names = f"{self.of(index)[0].name}..{self.of(index)[-1].name}"
                    raise ValueError(
                        f"images of shape {tuple(sample.shape[1:])} do not fit the model: "
                        f"units {names} say: {str(error).splitlines()[0]}"
                    ) from None
                shapes.append(tuple(x.shape[1:]))
        return shapes

    def drawing(self, sample: Tensor) -> list[dict[nn.Module, tuple[int, ...]]]:
        """For each block, the modules that draw random numbers in training, with numbers.

        The numbers distinguish their draws. They are that of the unit or, for a module that a graph
        calls, the places of the calls there; they do not depend on the cuts.
        """
        found: list[dict[nn.Module, tuple[int, ...]]] = [{} for _ in self.starts]
        x = sample[:2]  # two, because BatchNorm needs more than one value for each channel
        with mode(self.model, training=True), torch.no_grad():
            for i, module in enumerate(single_unit_blocks(self.units)):
                parts = [*module.children()]
                known: dict[nn.Module, tuple[int, ...]] = dict.fromkeys(parts, (i,))
                for part in parts:
                    known |= module_calls(part) if isinstance(part, fx.GraphModule) else {}
                draws, x = find_random_parts(module, known, x)
                block = found[bisect_right(self.starts, i) - 1]
                block |= {part: (*block.get(part, ()), *known[part]) for part in draws}
        return found


@no_exit()
def split(
    model: nn.Module | Sequence[tuple[str, nn.Module]],
    blocks: int | None = None,
    *,
    cuts: Sequence[str] | None = None,
    balance: str = "operations",
    inside: bool = False,
    sample: Any = None,
) -> Blocks:
    """Cut a model's units into contiguous blocks.

    The units are the children of an `nn.Sequential`, or the modules of a list of (name, module)
    that run one after the other. Any other module is traced, and its units are the pieces of its
    graph between which a single tensor is alive, or several tensors if blocks would be uneven
    otherwise or a cut names such a place. With `inside`, an `nn.Sequential` and a list are traced,
    too, and cut inside their units.

    `blocks` is the number of blocks, of about equal cost: `balance` "measured" times a forward and
    backward pass of each unit, "operations" counts its arithmetic and memory traffic (the same on
    every machine), "even" counts units. Alternatively, `cuts` names the first unit of every block
    but the first. `sample` is a batch of inputs for the trace and the cost: a tensor, a tuple (by
    position) or a dict (by name); this project's models have a sample of their own.

    Raises ValueError for a split that is not possible, with the number of units.
    """
    check(blocks, cuts, balance, sample)
    if isinstance(model, nn.Module):
        network, chain = model, units(model) if is_sequence(model) else []
        served = set(cuts or ()) <= {unit.name for unit in chain} and (blocks or 1) <= len(chain)
        own = sample is not None and not isinstance(model, Chain)
        along = inside or not chain or (own and not served)
    else:
        (network, chain), along = units_of_list(model), inside
    if along:
        return _along_graph(network, blocks, cuts, balance, sample, inside)
    return _in_blocks(network, chain, blocks, cuts, balance, sample)


def _in_blocks(
    model: nn.Module,
    chain: list[Unit],
    blocks: int | None,
    cuts: Sequence[str] | None,
    balance: str,
    sample: Any,
) -> Blocks:
    names = [unit.name for unit in chain]
    if cuts is not None:
        return Blocks(model, chain, [0, *cut_indices(list(cuts), names)])
    assert blocks is not None
    if not 1 <= blocks <= len(chain):
        raise ValueError(
            f"{blocks} blocks asked of {len(chain)} units ({', '.join(names)}): "
            f"ask for 1 to {len(chain)} blocks, or take a deeper model"
        )
    if blocks in (1, len(chain)):
        return Blocks(model, chain, list(range(blocks)))
    costs = _costs(model, chain, balance, sample)
    starts = balanced_starts([sum(cost) for cost in costs], blocks)
    return Blocks(model, chain, starts, costs)


def _costs(model: nn.Module, chain: list[Unit], balance: str, sample: Any) -> list[Cost]:
    if balance == "even":
        return [Cost(1.0, 2.0)] * len(chain)
    x = default_sample(model, sample)
    made = Blocks(model, chain, [0]).fitted(x)
    measure = counted_costs if balance == "operations" else measured_costs
    try:
        return measure(model, made.units, made.packed(x))
    except RuntimeError as error:
        raise ValueError(
            f"the units of {type(model).__name__} cannot be costed, one by one forward and "
            f"backward: {one_line(error)[:200]}; give cuts=, or mend the unit"
        ) from error


def _along_graph(
    model: nn.Module,
    blocks: int | None,
    cuts: Sequence[str] | None,
    balance: str,
    sample: Any,
    inside: bool,
) -> Blocks:
    """A traced module in blocks: single tensors cross the cuts, or several where that pays."""
    if inside:
        check_inside(model)
    if isinstance(model, Chain):
        sample = default_sample(model, sample)
    if sample is None and blocks == 1:
        return Blocks(model, [Unit("model", {"": model})], [0])
    if sample is None:
        raise ValueError(
            f"a {type(model).__name__} is cut along its graph, which needs sample=, a batch of its "
            "inputs"
        )
    graph = Graph(model, sample)
    chain = graph.units()
    if cuts is not None:
        made = _in_blocks(model, chain, None, graph.named(cuts), balance, sample)
    else:
        assert blocks is not None
        made = _balanced(model, chain, graph.widths, blocks, balance, sample, inside)
    check_shared([made.module(index) for index in range(len(made))])
    return made


def _balanced(
    model: nn.Module,
    chain: list[Unit],
    widths: list[int],
    blocks: int,
    balance: str,
    sample: Any,
    inside: bool,
) -> Blocks:
    """Balanced cuts, crossed by as few tensors as possible without a much slower block.

    `widths`: how many tensors go into each unit but the first.
    """
    known: dict[tuple[int, ...], Blocks] = {}

    def made(starts: Sequence[int]) -> Blocks:
        # what crosses no cut is not packed: a block's cost is not the sum of its units'
        if tuple(starts) not in known:
            found = Blocks(model, chain, list(starts), [Cost(0.0, 0.0)] * len(chain))
            runs = [found.of(k) for k in range(blocks)]
            own = _costs(model, [merged(run) for run in runs], balance, sample)
            for start, run, cost in zip(starts, runs, own, strict=True):
                units = len(run) if balance == "even" else 1
                found.costs[start] = Cost(*(units * part for part in cost))
            known[tuple(starts)] = found
        return known[tuple(starts)]

    uneven = UNEVEN_INSIDE if inside else UNEVEN
    tried: list[tuple[Blocks, list[int]]] = []
    for most in sorted(set(widths)) or [1]:
        places = [0, *[i for i, width in enumerate(widths, 1) if width <= most]]
        runs = [merged(chain[a:b]) for a, b in pairwise([*places, len(chain)])]
        if len(runs) < blocks:
            continue
        if blocks == 1:
            return Blocks(model, chain, [0])
        first = _in_blocks(model, runs, blocks, None, balance, sample).starts
        found = made([places[i] for i in first])
        tried.append((_improved(found, places, made) if inside else found, places))
        if _slowest(tried[-1][0]) <= uneven * min(_mean_cost(one) for one, _ in tried):
            break
    if not tried:
        return _in_blocks(model, chain, blocks, None, balance, sample)  # which raises the error
    least = min(_slowest(one) for one, _ in tried)
    chosen, places = next(pair for pair in tried if _slowest(pair[0]) <= uneven * least)
    return _improved(chosen, places, made)


def _improved(found: Blocks, places: list[int], made: Callable[[Sequence[int]], Blocks]) -> Blocks:
    """The blocks after moving cuts by one place as long as that makes the slowest block faster."""
    while True:
        starts, tried = found.starts, []
        slow = max(range(len(starts)), key=lambda k: sum(found.costs[found.starts[k]]))
        for k, by in ((slow, 1), (slow + 1, -1)):
            if 0 < k < len(starts) and (place := places.index(starts[k]) + by) < len(places):
                moved = [*starts[:k], places[place], *starts[k + 1 :]]
                if moved == sorted(set(moved)):
                    tried.append(made(moved))
        best = min(tried, key=_slowest, default=found)
        if _slowest(best) >= _slowest(found):
            return found
        found = best


def _slowest(blocks: Blocks) -> float:
    return max(map(sum, blocks.costs))


def _mean_cost(blocks: Blocks) -> float:
    return sum(map(sum, blocks.costs)) / len(blocks)


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
