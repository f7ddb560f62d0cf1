"""A plan's prediction for one recipe on one grid, and the best of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.bench.recipes import Recipe
from hybrid.links.grid import Grid

FILL_WORTH, SWEEP_WORTH = 0.3, 0.6
"""Progress of local work relative to ordinary steps on as many images: in budgets, and in sweeps.

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
    """Images of local steps over images of ordinary steps."""
    idle_share: list[float]
    bytes_per_image: float
    memory_bytes: list[int]
    batch_size: int
    """Samples of a replica's share."""
    optimizer: str = "sgd"
    """The name of the optimizer."""
    local_budgets: Sequence[tuple[int, int]] = ()
    """Samples of local steps that each block has time for in a tick; empty: no local work."""
    speed_up: float = 0.0
    """Over the fastest way to train on one rank."""

    @property
    def progress(self) -> float | None:
        """Images per second, weighted by the progress of a step; None if that is unknown."""
        measured = self.recipe.sync.exact or self.grid.replicas == 1
        return (self.worth or None) if measured else None

    @property
    def impossible(self) -> bool:
        """Whether the predicted speed-up exceeds the number of ranks."""
        return round(self.speed_up, 2) > self.grid.ranks

    @property
    def worth(self) -> float:
        """The progress as if replicas always agreed; 0 if it is unknown."""
        solver = self.recipe.solver
        if solver.alternates:
            return (1 + SWEEP_WORTH * self.local_share) * self.images_per_second
        step = solver.progress(self.grid.blocks, self.batch_size, self.optimizer) or 0.0
        return step * (1 + FILL_WORTH * self.local_share) * self.images_per_second


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the prediction of most progress per second or, if none is known, of most worth."""
    return max(predictions, key=lambda p: (p.progress or 0.0, p.worth))
