"""What is known of a training when its settings are checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.method.options import Options
from hybrid.settings.config import RoundSettings
from hybrid.solvers.base import Setup, Solver
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.exact.gaps import Gaps


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that decides whether the settings of a training can work and have an effect.

    The same for a run, a row of a bench and a row of a plan.
    """

    solver: Solver
    correction: PassSettings
    setup: Setup = field(default_factory=Setup)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    """With everything decided that was unset."""
    options: Options = field(default_factory=Options)
    """Settings of train, optimizer, schedule, links, sync and sampler, number of replicas, ..."""
    steps: int = 1
    """Mini-batches of an epoch."""
    round_batches: int = 1
    """Mini-batches of a round; of the longest one, where they differ."""
    gaps: tuple[Gaps, ...] = ()
    """Local work of each block in a pass; empty: no gaps are filled."""
    survival: float = 1.0
    """Least probability that a unit of the network is there in a pass."""
    draws: bool = False
    """Whether layers of the network draw random numbers."""
    normed: bool = False
    """Whether the network has running statistics."""
    shares_products: bool = False
    """Whether replicas divide what Muon would compute alike on all of them."""
    cutout: int = 0
    """Side of the square that is cut out of each training image, in pixels; 0: none."""
