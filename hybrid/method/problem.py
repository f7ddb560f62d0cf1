"""What is trained: a network in blocks, and what its data and objectives say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hybrid.data import Data
from hybrid.method.objectives import Objectives
from hybrid.method.training_options import Options
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.solvers.base import Shape
from hybrid.solvers.layers.branches import survival
from hybrid.solvers.layers.projection import Factorization, leading_projection


@dataclass(frozen=True)
class Problem:
    """A network in blocks with its data and objectives, for which a method is settled."""

    blocks: Blocks
    """They know which tensors go into their units."""
    objectives: Objectives
    inputs: Any
    """A few inputs of the network."""
    shapes: tuple[Shape, ...]
    """The shape of one sample at every cut."""
    drawing: list[dict[nn.Module, tuple[int, ...]]]
    """Of each block: the modules that draw random numbers, and the numbers of their units."""
    survival: float
    """Least probability that a unit is there in a pass."""
    normed: bool
    """Whether the network has running statistics."""
    steps: int
    """Mini-batches of an epoch."""
    augmented: bool
    """Whether samples are drawn anew in every epoch."""
    ordered: bool
    """Whether the data say in what order samples come."""
    streamed: bool
    """Whether they can be had in that order alone."""
    varies: bool
    """Whether they have several lengths."""

    @classmethod
    def of(cls, options: Options, blocks: Blocks, train: Data, test: Data | None = None) -> Problem:
        """ValueError, with the remedy, for a network, data and objectives that do not fit."""
        check_size(options.train.batch_size, train)
        if not any(p.requires_grad for p in blocks.model.parameters()):
            raise ValueError(
                f"{type(blocks.model).__name__} has 0 parameters to train: give it layers "
                "that have some, or let theirs require gradients"
            )
        inputs, _ = train.sample(SAMPLES)
        sets = [train] if test is None else [train, test]
        blocks = blocks.with_bundles(inputs)
        if not options.solver.alternates:  # which stores samples of one shape
            blocks = blocks.varying([x for data in sets for x in inputs_of(data)])
        objectives = Objectives.settle(options, blocks, train, train if test is None else test)
        sample = blocks.pack_inputs(inputs)
        shapes = tuple(blocks.cut_shapes(sample))
        choice = options.sampler.start(train, options.train.seed)
        steps = choice.batches(options.train.batch_size)
        if not steps:
            raise ValueError(
                f"the batch size is {options.train.batch_size}, more samples than the sampler "
                f"takes of {len(train)} in an epoch: choose a smaller one"
            )
        modules = list(blocks.model.modules())
        return cls(
            blocks,
            objectives,
            inputs,
            shapes,
            blocks.find_random_modules(sample),
            min(map(survival, modules)),
            any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
            steps,
            train.augmented,
            train.streamed or train.order is not None,
            train.streamed,
            any(data.varies for data in sets),
        )

    @property
    def draws(self) -> bool:
        """Whether layers of the network draw random numbers."""
        return any(self.drawing)

    @property
    def factorized(self) -> frozenset[int]:
        """The cuts whose block behind begins with a factorization."""
        leads = {k: leading_projection(self.blocks.module(k)) for k in range(1, len(self.blocks))}
        return frozenset(k for k, module in leads.items() if isinstance(module, Factorization))


def inputs_of(data: Data) -> list[Any]:
    """Inputs of every length that is known of a data set."""
    return [data.sample(2)[0], *(inputs for inputs, _ in data.others)]


def check_size(size: int, data: Data) -> None:
    """ValueError for a mini-batch of more samples than there are."""
    if size > len(data):
        raise ValueError(
            f"the batch size is {size} but there are {len(data)} training samples: choose a batch "
            f"size of at most {len(data)}"
        )
