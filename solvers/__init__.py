"""The algorithms; each is the program of one rank, written against `Links`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from solvers import registry

if TYPE_CHECKING:
    from solvers.base import Links, Program, Recorder, Setup, Solver
    from solvers.blocks.block import Block
    from solvers.delayed.ddg import DDG
    from solvers.delayed.fdg import FDG
    from solvers.delayed.features_replay import FeaturesReplay
    from solvers.delayed.pd_asgd import PDASGD
    from solvers.delayed.petra import Petra
    from solvers.exact.backprop import Backprop
    from solvers.instances.ampnet import AMPNet
    from solvers.local.local_updates import LocalUpdates
    from solvers.splitting.augmented_lagrangian import AugmentedLagrangian
    from solvers.splitting.auxnet import AuxNet
    from solvers.splitting.block_admm import BlockADMM
    from solvers.splitting.penalty import Penalty
    from solvers.state import State
    from solvers.windows import Batch, PhaseStats, Record, Window

__all__ = [
    "DDG",
    "FDG",
    "PDASGD",
    "AMPNet",
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
    "Block": "solvers.blocks.block",
    "State": "solvers.state",
    **dict.fromkeys(("Batch", "PhaseStats", "Record", "Window"), "solvers.windows"),
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that a look at the names need not import torch."""
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module 'solvers' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "solvers.base")), name)
