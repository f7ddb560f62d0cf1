"""DDG: gradients at the weights that the forward pass used (Huo et al., arXiv 1804.10574)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from torch import Tensor, nn

from solvers.base import GraphBytes, program_of
from solvers.delayed.base import Delayed, DelayedProgram, tensor_bytes
from solvers.delayed.flights import Flight
from solvers.delayed.stash import Stash
from solvers.exact.micro_batches import MicroBatch

LOST_A_STEP = 0.27
"""Share of an exact step's progress that is lost for each step of delay in the first block.

It is measured up to a delay of one step, in short trainings at a high learning rate, where the loss
is largest: docs/benchmarks/delays/accuracy.md.
"""


@dataclass(frozen=True)
class DDG(Delayed):
    r"""Decoupled parallel back-propagation with delayed gradients (Huo et al., arXiv 1804.10574).

    `Delayed` with d_k = K-1-k; the gradient of a micro-batch is taken at the weights that its
    forward pass used. Block k keeps d_k graphs, and ceil(d_k / m) versions of its weights beside
    the newest, each shared by the micro-batches that used it.
    """

    name: ClassVar[str] = "ddg"

    def progress(self, count: int, size: int) -> float | None:
        steps = self.delay(0, count) / self.num_micro_batches(size)
        return 1 - LOST_A_STEP * steps if steps <= 1 else None

    def versions(self, index: int, count: int, size: int) -> int:
        return ceil(self.delay(index, count) / self.num_micro_batches(size))

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        graphs = (self.delay(index, count) + 1) * graph(module, self.first_part(lam))
        older = self.versions(index, count, len(lam))
        return graphs + older * tensor_bytes(module.parameters())


@program_of(DDG)
class StashingProgram(DelayedProgram):
    """Keeps every flight's graph, over the version of the weights that its forward pass used."""

    def begin(self) -> None:
        super().begin()
        module = self.block.module
        self._stash = Stash(module, dict(module.named_parameters()))

    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        flight = Flight(part, self._leaf(lam), weights=self._stash.newest_version())
        with self._stash.forward_pass(flight.buffers):
            out = self._compute(flight)
        self._send_output(out.detach())
        return flight

    def _compute(self, flight: Flight) -> Tensor:
        assert flight.lam is not None
        flight.out = self.block.forward(flight.lam, flight.part.key, flight.weights)
        return flight.out

    def _rebuild(self, flight: Flight) -> Flight:
        assert flight.weights is not None
        flight.lam = self._leaf(flight.lam)
        with self._stash.repeated_pass(flight.weights, flight.buffers):
            self._compute(flight)
        return flight

    def _backward(self, flight: Flight) -> None:
        assert flight.out is not None
        assert flight.lam is not None
        assert flight.weights is not None
        p_out = self._receive_adjoint(flight.part, flight.out.dtype)
        # the mini-batch's sum of gradients moves to this version and back
        for name, parameter in self._stash.parameters.items():
            flight.weights[name].grad, parameter.grad = parameter.grad, None
        self.block.backward(flight.out, p_out, key=flight.part.key)
        for name, parameter in self._stash.parameters.items():
            parameter.grad, flight.weights[name].grad = flight.weights[name].grad, None
        self._stash.release(flight.weights, flight.buffers)
        self._finish(flight.part, flight.lam)

    def _step(self, part: MicroBatch) -> None:
        if part.is_last:
            self._stash.before_step()
        super()._step(part)
