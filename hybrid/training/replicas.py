"""Which ranks of a grid lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybrid.cuts.partition import Blocks
from hybrid.method.method import Method
from hybrid.ranks.grid import Arrangement
from solvers.base import Shape
from solvers.sync.base import Strategy


def arrangement(method: Method) -> Arrangement:
    """Which ranks have consecutive numbers, usually on one host: as asked for, else `closest`."""
    options, blocks = method.options, method.problem.blocks
    if options.side_by_side != "auto":
        return options.side_by_side
    size = options.train.batch_size
    return closest(blocks, method.setup.shapes, size, options.replicas, options.sync)


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
