"""What a plan predicts of one way to train, and which of several is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.bench.recipes import Recipe
from hybrid.links.grid import Grid

FILL_WORTH, SWEEP_WORTH = 0.3, 0.6
"""Progress of local work over that of steps on as many images: in waits, and in sweeps.

Measured: docs/benchmarks/auxiliary/filled-waits.md, and sweeps.md beside it.
"""


@dataclass
class Prediction:
    """One recipe on one grid. Lists are by block."""

    blocks: int
    recipe: Recipe
    cuts: list[str]
    images_per_second: float
    local_share: float
    """Images of local steps over images of the others."""
    idle_share: list[float]
    bytes_per_image: float
    memory_bytes: list[int]
    batch_size: int
    """Of a replica's share."""
    replicas: int = 1
    optimizer: str = "sgd"
    """The name of the one whose steps they are."""
    waits: Sequence[tuple[int, int]] = ()
    """Samples of local steps that each block has time for in a tick; empty: none are asked for."""
    speed_up: float = 0.0
    """Over the fastest way to train on one rank."""

    @property
    def grid(self) -> Grid:
        """K x R."""
        return Grid(self.blocks, self.replicas)

    @property
    def progress(self) -> float | None:
        """Images a second, weighted by what a step is worth; None where that is not measured."""
        known = self.recipe.sync.exact or self.replicas == 1
        return (self.worth or None) if known else None

    @property
    def impossible(self) -> bool:
        """Whether it is predicted to gain more than there are ranks."""
        return round(self.speed_up, 2) > self.grid.ranks

    @property
    def worth(self) -> float:
        """The progress if replicas always agreed; 0 where it is not measured."""
        own = self.recipe.solver.progress(self.blocks, self.batch_size, self.optimizer)
        if self.recipe.solver.alternates:
            own = 1 + SWEEP_WORTH * self.local_share
        elif own is not None:
            own *= 1 + FILL_WORTH * self.local_share
        return (own or 0.0) * self.images_per_second


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction of most progress a second, or, where none is known, of most worth."""
    return max(predictions, key=lambda p: (p.progress or 0.0, p.worth))
