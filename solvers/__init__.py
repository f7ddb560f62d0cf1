"""The algorithms; each is the program of one rank, written against `Links`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybrid.solvers import registry

if TYPE_CHECKING:
    from hybrid.solvers.base import Links, Program, Recorder, Setup, Solver
    from hybrid.solvers.block import Block
    from hybrid.solvers.delayed.ddg import DDG
    from hybrid.solvers.delayed.fdg import FDG
    from hybrid.solvers.delayed.features_replay import FeaturesReplay
    from hybrid.solvers.delayed.pd_asgd import PDASGD
    from hybrid.solvers.delayed.petra import Petra
    from hybrid.solvers.exact.exact_pass import Backprop
    from hybrid.solvers.local.local_updates import LocalUpdates
    from hybrid.solvers.splitting.augmented_lagrangian import AugmentedLagrangian
    from hybrid.solvers.splitting.auxnet import AuxNet
    from hybrid.solvers.splitting.block_admm import BlockADMM
    from hybrid.solvers.splitting.penalty import Penalty
    from hybrid.solvers.state import State
    from hybrid.solvers.windows import Batch, PhaseStats, Record, Window

__all__ = [
    "DDG",
    "FDG",
    "PDASGD",
    "AugmentedLagrangian",
    "AuxNet",
    "Backprop",
    "Batch",
    "Block",
    "BlockADMM",
    "FeaturesReplay",
    "Links",
    "LocalUpdates",
    "Penalty",
    "Petra",
    "PhaseStats",
    "Program",
    "Record",
    "Recorder",
    "Setup",
    "Solver",
    "State",
    "Window",
]

_HOMES = {place.partition(":")[2]: place.partition(":")[0] for place in registry.OWN.values()} | {
    "Block": "hybrid.solvers.block",
    "State": "hybrid.solvers.state",
    **dict.fromkeys(("Batch", "PhaseStats", "Record", "Window"), "hybrid.solvers.windows"),
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that a look at the names need not import torch."""
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "hybrid.solvers.base")), name)


def __dir__() -> list[str]:
    return __all__


if __name__ == "solvers":  # in a clone; a second copy of each class would be no class of a run's
    raise ImportError("the folder solvers is the package hybrid.solvers: import hybrid.solvers")
