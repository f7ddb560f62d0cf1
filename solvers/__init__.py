"""The algorithms: each a rank's program, written against `Links`."""

from __future__ import annotations

from solvers.augmented_lagrangian import AugmentedLagrangian
from solvers.auxnet import AuxNet
from solvers.backprop import Backprop
from solvers.base import Links, Program, Recorder, Setup, Solver
from solvers.block_admm import BlockADMM
from solvers.blocks.block import Block
from solvers.delayed import DDG, FDG, FeaturesReplay
from solvers.local_updates import LocalUpdates
from solvers.penalty import Penalty
from solvers.petra import Petra
from solvers.state import State
from solvers.windows import Batch, PhaseStats, Record, Window

REGISTRY: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        *(Backprop, Penalty, AugmentedLagrangian, BlockADMM, AuxNet),
        *(DDG, FeaturesReplay, FDG, Petra, LocalUpdates),
    )
}

__all__ = [
    "DDG",
    "FDG",
    "REGISTRY",
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
