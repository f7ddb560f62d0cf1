"""What a plan predicts of one way to train, and which of several is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.bench.recipes import Recipe
from hybrid.links.grid import Grid

FILL_WORTH, SWEEP_WORTH = 0.3, 0.6
"""Progress of local work over that of steps on as many images: in budgets, and in sweeps.

Measured: docs/benchmarks/auxiliary/filled-waits.md, and sweeps.md beside it.
"""


@dataclass
class Prediction:
    """One recipe on one grid. Lists are by block."""

    grid: Grid
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
    optimizer: str = "sgd"
    """The name of the one whose steps they are."""
    local_budgets: Sequence[tuple[int, int]] = ()
    """Samples of local steps that each block has time for in a tick; empty: none are asked for."""
    speed_up: float = 0.0
    """Over the fastest way to train on one rank."""

    @property
    def progress(self) -> float | None:
        """Images a second, weighted by what a step is worth; None where that is not measured."""
        measured = self.recipe.sync.exact or self.grid.replicas == 1
        return (self.worth or None) if measured else None

    @property
    def impossible(self) -> bool:
        """Whether it is predicted to gain more than there are ranks."""
        return round(self.speed_up, 2) > self.grid.ranks

    @property
    def worth(self) -> float:
        """The progress if replicas always agreed; 0 where it is not measured."""
        solver = self.recipe.solver
        if solver.alternates:
            return (1 + SWEEP_WORTH * self.local_share) * self.images_per_second
        step = solver.progress(self.grid.blocks, self.batch_size, self.optimizer) or 0.0
        return step * (1 + FILL_WORTH * self.local_share) * self.images_per_second


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction of most progress a second, or, where none is known, of most worth."""
    return max(predictions, key=lambda p: (p.progress or 0.0, p.worth))
