"""The algorithms: each a rank's program, written against `Links`."""

from __future__ import annotations

from solvers.augmented_lagrangian import AugmentedLagrangian
from solvers.auxnet import AuxNet
from solvers.backprop import Backprop
from solvers.base import Batch, Block, Links, PhaseStats, Recorder, Solver, Window
from solvers.block_admm import BlockADMM
from solvers.penalty import Penalty

REGISTRY: dict[str, type[Solver]] = {
    solver.name: solver for solver in (Backprop, Penalty, AugmentedLagrangian, BlockADMM, AuxNet)
}

__all__ = [
    "REGISTRY",
    "AugmentedLagrangian",
    "AuxNet",
    "Backprop",
    "Batch",
    "Block",
    "BlockADMM",
    "Links",
    "Penalty",
    "PhaseStats",
    "Recorder",
    "Solver",
    "Window",
]
