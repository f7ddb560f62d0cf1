"""Features Replay: delayed gradients at the newest weights, by replay (Huo et al., 1807.04511)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.solvers.base import program_of
from hybrid.solvers.delayed.base import Delayed, DelayedProgram
from hybrid.solvers.delayed.stash import Flight
from hybrid.solvers.numerics.buffers import frozen_statistics


@dataclass(frozen=True)
class FeaturesReplay(Delayed):
    r"""Features Replay (Huo et al., arXiv 1807.04511).

    `Delayed` with d_k = K-1-k; a block keeps the inputs of d_k micro-batches, but no graph and no
    older weights. The backward pass first replays the forward pass of micro-batch n - d_k at the
    newest weights. The replay updates BatchNorm's running statistics; the first pass does not.
    """

    name: ClassVar[str] = "features-replay"
    waits: ClassVar[bool] = True

    @property
    def replays(self) -> bool:
        return True


@program_of(FeaturesReplay)
class ReplayingProgram(DelayedProgram):
    """Keeps of its flights the inputs only."""

    def _forward(self, flight: Flight) -> Tensor:
        with torch.no_grad(), frozen_statistics(self.block.module):
            x = self._compute(flight)
        flight.x = None if self.filling is None else x
        return x

    def _backward(self, flight: Flight) -> Tensor | None:
        # the adjoint may still be on its way: it is received after the replay
        out = flight.out = self._compute(flight)
        p_out = self._receive_adjoint(flight, out.dtype)
        self.block.backward(out, p_out, key=flight.part.key)
        return self._input_adjoint(flight)
