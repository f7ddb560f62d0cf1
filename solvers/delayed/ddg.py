"""DDG: gradients at the weights that the forward pass used (Huo et al., arXiv 1804.10574)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Needs
from hybrid.solvers.base import GraphBytes, Links, Program, Setup, program_of
from hybrid.solvers.blocks.block import Block
from hybrid.solvers.delayed.base import SEVERAL_BLOCKS, Delayed, DelayedProgram, tensor_bytes
from hybrid.solvers.delayed.flights import Flight
from hybrid.solvers.delayed.stash import Stash
from hybrid.solvers.delayed.unstashed import UnstashedProgram
from hybrid.solvers.exact.pipeline import MicroBatch

DELAYS = 0.0, 3 / 8, 7 / 8, 15 / 8
"""Delays of the first block, in steps, at which it was measured what a step is worth."""
LOST = {
    "sgd": (0.0, 0.09, 0.20, 0.32),
    "muon": (0.0, 0.08, 0.14, 0.34),
    "soap": (0.0, 0.05, 0.08, 0.33),
    "adamw": (0.0, 0.13, 0.24),
}
"""By optimizer: the share of an exact step's progress that each of `DELAYS` costs.

It is the share of the epochs by which a flushed training could be shorter for the same accuracy, in
short trainings at high learning rates, where the loss is largest
(docs/benchmarks/delays/tolerance.md). Other optimizers count as adamw, which loses most.
"""

FLOAT32 = Needs(
    "train.precision is 'float32', since autocast keeps a copy of the weights in every graph",
    lambda run: run.train.precision == "float32",
    "keep the stash",
)
STASHES = Needs(
    "solver.stash is true, since activations that are computed again come from the newest weights",
    lambda run: run.solver.stash,
    "leave one of them out, or choose a solver that replays forward passes",
)


@dataclass(frozen=True)
class DDG(Delayed):
    r"""Decoupled parallel back-propagation with delayed gradients (Huo et al., arXiv 1804.10574).

    `Delayed` with d_k = K-1-k; the gradient of a micro-batch is taken at the weights that its
    forward pass used. Block k keeps d_k graphs, and ceil(d_k / m) versions of its weights beside
    the newest, each shared by the micro-batches that used it. With `recompute` it keeps d_k inputs
    and one graph, which it makes again at that version before the backward pass, with the same bits
    (Chen et al., arXiv 1604.06174).

    Without `stash` it keeps the d_k graphs and no older weights: where a backward pass needs a
    weight, it takes the newest, with the activations as the forward pass has left them (PACI, arXiv
    2606.07881; AsyncPP, arXiv 2505.01099). That is the gradient of no function, and 1F1B's memory.
    """

    name: ClassVar[str] = "ddg"

    stash: Annotated[bool, SEVERAL_BLOCKS, FLOAT32] = True
    """Keep the weights of forward passes for their backward passes; false: take the newest."""
    recompute: Annotated[bool, SEVERAL_BLOCKS, STASHES] = False
    """Keep only block inputs, and run forward again before backward: less memory, same bits."""

    def start(self, block: Block, links: Links, setup: Setup) -> Program:
        return (
            super().start(block, links, setup)
            if self.stash
            else UnstashedProgram(self, block, links, setup)
        )

    def progress(self, count: int, size: int, optimizer: str = "sgd") -> float | None:
        lost, late = LOST.get(optimizer, LOST["adamw"]), self.steps_late(0, count, size)
        for (a, low), (b, high) in pairwise(zip(DELAYS, lost, strict=False)):
            if a <= late <= b:
                return 1 - low - (high - low) * (late - a) / (b - a)
        return None

    def versions(self, index: int, count: int, size: int) -> int:
        if not self.stash:
            return 0
        return ceil(self.delay(index, count) / self.num_micro_batches(size))

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, d = self.first_part(lam), self.delay(index, count)
        older = self.versions(index, count, len(lam)) * tensor_bytes(module.parameters())
        if self.recompute:
            return graph(module, x) + d * tensor_bytes([x]) + older
        return (d + 1) * graph(module, x) + older


@program_of(DDG)
class StashingProgram(DelayedProgram):
    """Keeps every flight's graph, over the version of the weights that its forward pass used."""

    solver: DDG

    def begin(self) -> None:
        super().begin()
        module = self.block.module
        self._stash = Stash(module, dict(module.named_parameters()))

    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        flight = Flight(part, self._leaf(lam), weights=self._stash.newest_version())
        kept = torch.set_grad_enabled(not self.solver.recompute)
        with kept, self._stash.forward_pass(flight.buffers):
            out = self._compute(flight)
        self._send_output(out.detach())
        if self.solver.recompute:
            flight.out = None
        return flight

    def _compute(self, flight: Flight) -> Tensor:
        assert flight.lam is not None
        flight.out = self.block.forward(flight.lam, flight.part.key, flight.weights)
        return flight.out

    def _rebuild(self, flight: Flight) -> Flight:
        assert flight.weights is not None
        flight.lam = self._leaf(flight.lam)
        with self._stash.repeated_pass(flight.weights, flight.buffers):
            if not self.solver.recompute:
                self._compute(flight)
        return flight

    def _recompute(self, flight: Flight) -> Tensor:
        assert flight.weights is not None
        with self._stash.repeated_pass(flight.weights, flight.buffers):
            return self._compute(flight)

    def _backward(self, flight: Flight) -> None:
        out = self._recompute(flight) if flight.out is None else flight.out
        assert flight.lam is not None
        assert flight.weights is not None
        p_out = self._receive_adjoint(flight.part, out.dtype)
        # the mini-batch's sum of gradients moves to this version and back
        for name, parameter in self._stash.parameters.items():
            flight.weights[name].grad, parameter.grad = parameter.grad, None
        self.block.backward(out, p_out, key=flight.part.key)
        for name, parameter in self._stash.parameters.items():
            parameter.grad, flight.weights[name].grad = flight.weights[name].grad, None
        self._stash.release(flight.weights, flight.buffers)
        self._finish(flight.part, flight.lam)

    def _step(self, part: MicroBatch) -> None:
        if part.is_last:
            self._stash.before_step()
        super()._step(part)
