"""Units into blocks: evenly, by counted operations, by measured time, or by the user's cuts."""

import difflib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

import torch
from torch import Tensor, nn

from hybrid.cuts.costs import counted_costs, measured_costs
from hybrid.models import Chain, Unit, mode, units
from solvers.base import Shape
from solvers.blocks.draws import drawing
from solvers.blocks.norms import frozen_statistics
from solvers.passes.pipeline import Cost

BALANCES = ("operations", "measured", "even")
SAMPLES = 32
"""Batch to cost the units with: what is read once a batch, the weights, counts by its size."""


class BlockModule(nn.Sequential):
    """A block's units in running order, with the global names of their tensors."""

    def __init__(self, block: Sequence[Unit]) -> None:
        parts = [(prefix, m) for unit in block for prefix, m in unit.parts.items()]
        super().__init__(OrderedDict((str(i), m) for i, (_, m) in enumerate(parts)))
        self.prefixes = [prefix for prefix, _ in parts]

    def global_name(self, local: str) -> str:
        """Name in the whole model's state dict of the tensor `local` of this module's."""
        index, _, rest = local.partition(".")
        return f"{self.prefixes[int(index)]}.{rest}"


@dataclass
class Blocks:
    """A model cut into blocks: block k runs units starts[k] .. starts[k+1]-1."""

    model: nn.Sequential
    units: list[Unit]
    starts: list[int]
    costs: list[Cost] = field(default_factory=list)
    """Of each unit and a sample, in the units of what was balanced; empty for explicit cuts."""

    def __len__(self) -> int:
        return len(self.starts)

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
        return BlockModule(self.of(index))

    def block_costs(self, sample: Tensor | None = None) -> list[Cost]:
        """Cost a sample of each block; counted operations where nothing was balanced."""
        costs = self.costs or counted_costs(
            self.model, self.units, default_sample(self.model, sample)
        )
        ends = [*self.starts[1:], len(self.units)]
        runs = [costs[a:b] for a, b in zip(self.starts, ends, strict=True)]
        return [Cost(*(sum(part) for part in zip(*run, strict=True))) for run in runs]

    def cut_shapes(self, sample: Tensor) -> list[Shape]:
        """One sample's shape at every cut; `sample` is a batch (N, C, H, W) of at least one.

        Raises ValueError if the model does not take it.
        """
        shapes: list[Shape] = []
        with mode(self.model, training=False), torch.no_grad():
            x = sample[:1]
            for index in range(len(self)):
                try:
                    x = self.module(index)(x)
                except RuntimeError as error:
                    names = f"{self.of(index)[0].name}..{self.of(index)[-1].name}"
                    raise ValueError(
                        f"images of shape {tuple(sample.shape[1:])} do not fit the model: "
                        f"units {names} say: {str(error).splitlines()[0]}"
                    ) from None
                shapes.append(tuple(x.shape[1:]))
        return shapes[:-1]

    def drawing(self, sample: Tensor) -> dict[nn.Module, int]:
        """The modules that draw random numbers in training, and the number of each one's unit."""
        parts = [(part, i) for i, unit in enumerate(self.units) for part in unit.parts.values()]
        with mode(self.model, training=True), frozen_statistics(self.model):
            # two, because BatchNorm cannot do with one value a channel
            draws = drawing((part for part, _ in parts), sample[:2])
        return {part: unit for (part, unit), drew in zip(parts, draws, strict=True) if drew}


def split(
    model: nn.Sequential,
    blocks: int | None = None,
    *,
    cuts: Sequence[str] | None = None,
    balance: str = "operations",
    sample: Tensor | None = None,
) -> Blocks:
    """Cut a model's units into contiguous blocks.

    `blocks` of about equal cost: "measured" times a forward and backward pass of each unit,
    "operations" counts its arithmetic and memory traffic (the same on every machine), "even" counts
    units. Or `cuts`: the first unit of every block but the first, by name. `sample` is a batch
    (N, C, H, W) to measure with; this project's models know their own.

    Raises ValueError for a split that cannot be, with the number of units there are.
    """
    chain = units(model)
    names = [unit.name for unit in chain]
    if cuts is not None:
        return Blocks(model, chain, [0, *_indices(list(cuts), names)])
    if blocks is None:
        raise ValueError("split needs a number of blocks, or cuts by unit name")
    if not 1 <= blocks <= len(chain):
        raise ValueError(
            f"{blocks} blocks asked of {len(chain)} units ({', '.join(names)}): "
            f"ask for 1 to {len(chain)} blocks, or take a deeper model"
        )
    if balance not in BALANCES:
        raise ValueError(f"balance is {balance!r}; choose one of {', '.join(BALANCES)}")
    if blocks in (1, len(chain)):
        return Blocks(model, chain, list(range(blocks)))
    if balance == "even":
        costs = [Cost(1.0, 2.0)] * len(chain)
    else:
        measure = counted_costs if balance == "operations" else measured_costs
        costs = measure(model, chain, default_sample(model, sample))
    return Blocks(model, chain, balanced_starts([sum(cost) for cost in costs], blocks), costs)


def default_sample(model: nn.Sequential, sample: Tensor | None) -> Tensor:
    """What to run the units on."""
    if sample is not None:
        return sample
    if not isinstance(model, Chain):
        raise ValueError(
            "costs need sample=, a batch of inputs to run the units on; "
            "or give cuts=, or balance='even'"
        )
    x = torch.randn(SAMPLES, *model.input_shape, generator=torch.Generator().manual_seed(0))
    return x.to(memory_format=torch.channels_last)


def balanced_starts(costs: Sequence[float], blocks: int) -> list[int]:
    """Starts of `blocks` contiguous runs whose largest sum is least.

    Exact, by dynamic programming; among equals the sum of squares decides, then the earlier cut.
    """
    sums = [0.0, *accumulate(costs)]
    peak, _ = _best_runs(sums, blocks, max)
    _, starts = _best_runs(
        sums, blocks, lambda squares, run: squares + run**2 if run <= peak else inf
    )
    return starts


def _best_runs(
    sums: Sequence[float], blocks: int, extend: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least score, and the starts that have it; `extend` adds a run to a score."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(blocks):
        best = {
            end: min(
                (extend(score, sums[end] - sums[start]), [*starts, start])
                for start, (score, starts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(sums))
        }
    return best[len(sums) - 1]


def _indices(cuts: list[str], names: list[str]) -> list[int]:
    found: list[int] = []
    for cut in cuts:
        if cut not in names:
            near = difflib.get_close_matches(cut, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else "see the list"
            raise ValueError(
                f"no unit {cut!r} among the {len(names)} units ({', '.join(names)}); {hint}"
            )
        found.append(names.index(cut))
    if 0 in found:
        raise ValueError(f"a cut before {names[0]!r}, the first unit, would leave block 0 empty")
    if found != sorted(set(found)):
        raise ValueError(f"cuts {cuts} are not in the model's order: {', '.join(names)}")
    return found
