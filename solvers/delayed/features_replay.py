"""Features Replay: forward again, at the newest weights (Huo et al., arXiv 1807.04511)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.base import program_of
from solvers.blocks.buffers import frozen_statistics
from solvers.delayed.base import Delayed, DelayedProgram, Flight
from solvers.exact.micro_batches import MicroBatch


@dataclass(frozen=True)
class FeaturesReplay(Delayed):
    r"""Features Replay (Huo et al., arXiv 1807.04511).

    `Delayed` with d_k = K-1-k; a block keeps the inputs of d_k micro-batches, no graph and no
    weights. The backward pass replays micro-batch n - d_k at the newest weights, and moves
    BatchNorm's running statistics, which the first forward pass leaves alone.
    """

    name: ClassVar[str] = "features-replay"


@program_of(FeaturesReplay)
class ReplayingProgram(DelayedProgram):
    """Keeps the inputs of its flights alone."""

    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        with torch.no_grad(), frozen_statistics(self.block.module):
            self._up(self.block.forward(lam, part.key))
        return Flight(part, lam)

    def _backward(self, flight: Flight) -> None:
        lam = self._leaf(flight.lam)
        # before the adjoint is asked for, which may have a way to go yet
        out = self.block.forward(lam, flight.part.key)
        self.block.backward(out, self._adjoint(flight.part, out.dtype), key=flight.part.key)
        self._finish(flight.part, lam)
