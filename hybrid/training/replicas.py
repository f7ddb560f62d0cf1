"""Grids of blocks and replicas, and which of their ranks lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hybrid.cuts.partition import Blocks
from hybrid.links.base import Side
from hybrid.method.setup import RunSetup
from solvers.base import Shape
from solvers.sync.base import Strategy


class Grid(NamedTuple):
    """K blocks x R replicas."""

    blocks: int
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """K R."""
        return self.blocks * self.replicas

    def __str__(self) -> str:
        parts = [
            f"{count} {what}{'s' * (count > 1)}"
            for count, what in ((self.blocks, "block"), (self.replicas, "replica"))
            if count > 1
        ]
        return " x ".join(parts) or "1 block"


def grids(ranks: int, units: int, samples: int) -> list[Grid]:
    """Every way to write so many ranks as K x R, most blocks first; ValueError if there is none.

    A block has a unit of the model at least, and a replica a sample of the mini-batch.
    """

    def ways(count: int) -> list[Grid]:
        blocks = range(min(units, count), 0, -1)
        return [Grid(K, count // K) for K in blocks if count % K == 0 and count <= K * samples]

    if found := ways(ranks):
        return found
    near = next(count for count in range(min(ranks, units * samples), 0, -1) if ways(count))
    raise ValueError(
        f"{ranks} ranks are no K blocks x R replicas of a model of {units} units and a mini-batch "
        f"of {samples} samples: take {near} ranks, or a larger --batch-size"
    )


def wrong_product(blocks: int, replicas: int, ranks: int) -> str:
    """That blocks times replicas are not the ranks, and what would do."""
    ways = [f"mpirun -n {blocks * replicas}"]
    if ranks % blocks == 0:
        ways.append(f"--replicas {ranks // blocks}")
    if ranks % replicas == 0:
        ways.append(f"--blocks {ranks // replicas}")
    return (
        f"{blocks} blocks x {replicas} replicas are {blocks * replicas} ranks, and there are "
        f"{ranks}: choose {' or '.join(ways)}"
    )


def arrangement(setup: RunSetup) -> Side:
    """Which ranks lie side by side, as a rule on one host: as asked for, else `closest`."""
    if setup.side_by_side != "auto":
        return setup.side_by_side
    size, shapes = setup.train.batch_size, setup.method.setup.shapes
    return closest(setup.blocks, shapes, size, setup.replicas, setup.sync)


def closest(
    blocks: Blocks, shapes: Sequence[Shape], size: int, replicas: int, sync: Strategy
) -> Side:
    """Which ranks send each other more: those of a chain, or peers.

    In a step a chain sends activations and adjoints of its share of the mini-batch over every cut,
    peers their gradients twice, but for what is their own.
    """
    R = replicas
    values = sum(map(prod, shapes)) * size / R
    weights = sum(p.numel() for p in blocks.model.parameters())
    every = getattr(sync, "steps", 1)
    return "chain" if values >= weights * (R - 1) / R / every else "peers"
