"""Serial training: back-propagation through the links, exact at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers.base import Solver
from solvers.exact.exact_pass import ExactPass, PassSettings


@dataclass(frozen=True)
class Backprop(PassSettings, Solver):
    """The exact pass alone: every mini-batch is one step on the gradient of the whole network.

    The mathematics is `passes.exact.ExactPass`'s. As a `correction` beside another method it gives
    that pass's settings.
    """

    name: ClassVar[str] = "backprop"
    exact: ClassVar[bool] = True

    def progress(self, count: int, size: int) -> float:
        return 1.0

    def parts(self, size: int) -> int:
        return min(self.micro_batches, size)


Backprop.program = ExactPass
