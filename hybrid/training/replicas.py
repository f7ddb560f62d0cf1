"""Which ranks of a grid lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybrid.cuts.partition import Blocks
from hybrid.method.setup import RunSetup
from hybrid.ranks.grid import Arrangement
from solvers.base import Shape
from solvers.sync.base import Strategy


def arrangement(setup: RunSetup) -> Arrangement:
    """Which ranks lie side by side, as a rule on one host: as asked for, else `closest`."""
    if setup.side_by_side != "auto":
        return setup.side_by_side
    size, shapes = setup.train.batch_size, setup.method.setup.shapes
    return closest(setup.blocks, shapes, size, setup.replicas, setup.sync)


def closest(
    blocks: Blocks, shapes: Sequence[Shape], size: int, replicas: int, sync: Strategy
) -> Arrangement:
    """Which ranks send each other more: those of a chain, or peers.

    In a step a chain sends activations and adjoints of its share of the mini-batch over every cut,
    peers their gradients twice, but for what is their own.
    """
    R = replicas
    values = sum(map(prod, shapes)) * size / R
    weights = sum(p.numel() for p in blocks.model.parameters())
    every = getattr(sync, "steps", 1)
    return "chain" if values >= weights * (R - 1) / R / every else "peers"
