"""The algorithms; each is the program of one rank, written against `Links`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybrid.solvers import registry

if TYPE_CHECKING:
    from hybrid.solvers.base import Links as Links
    from hybrid.solvers.base import Program as Program
    from hybrid.solvers.base import Recorder as Recorder
    from hybrid.solvers.base import Setup as Setup
    from hybrid.solvers.base import Solver as Solver
    from hybrid.solvers.block import Block as Block
    from hybrid.solvers.delayed.ddg import DDG as DDG
    from hybrid.solvers.delayed.fdg import FDG as FDG
    from hybrid.solvers.delayed.features_replay import FeaturesReplay as FeaturesReplay
    from hybrid.solvers.delayed.petra import Petra as Petra
    from hybrid.solvers.exact.exact_pass import Backprop as Backprop
    from hybrid.solvers.local.local_updates import LocalUpdates as LocalUpdates
    from hybrid.solvers.splitting.augmented_lagrangian import (
        AugmentedLagrangian as AugmentedLagrangian,
    )
    from hybrid.solvers.splitting.block_admm import BlockADMM as BlockADMM
    from hybrid.solvers.splitting.penalty import Penalty as Penalty
    from hybrid.solvers.state import State as State
    from hybrid.solvers.windows import Batch as Batch
    from hybrid.solvers.windows import PhaseStats as PhaseStats
    from hybrid.solvers.windows import Record as Record
    from hybrid.solvers.windows import Window as Window

_HOMES = {place.partition(":")[2]: place.partition(":")[0] for place in registry.OWN.values()} | {
    "Block": "hybrid.solvers.block",
    "State": "hybrid.solvers.state",
    **dict.fromkeys(("Links", "Program", "Recorder", "Setup", "Solver"), "hybrid.solvers.base"),
    **dict.fromkeys(("Batch", "PhaseStats", "Record", "Window"), "hybrid.solvers.windows"),
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that a look at the names need not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


if __name__ == "solvers":  # in a clone; a second copy of each class would be no class of a run's
    raise ImportError("the folder solvers is the package hybrid.solvers: import hybrid.solvers")
