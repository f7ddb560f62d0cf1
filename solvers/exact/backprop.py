"""Exact back-propagation through the blocks, pipelined in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybrid.solvers.base import Solver
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings


@dataclass(frozen=True)
class Backprop(PassSettings, Solver):
    """Every mini-batch is one step on the gradient of the whole network.

    The mathematics is that of `ExactPass`. As the `correction` of another method it holds the
    settings of that pass.
    """

    name: ClassVar[str] = "backprop"
    exact: ClassVar[bool] = True

    def progress(self, count: int, size: int, optimizer: str = "sgd") -> float:
        return 1.0


Backprop.program = ExactPass
