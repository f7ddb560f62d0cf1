"""DDG: gradients at the weights that their micro-batch met (Huo et al., arXiv 1804.10574)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from torch import Tensor, nn

from solvers.base import GraphBytes, program_of
from solvers.blocks.buffers import captured_buffers, frozen_statistics, has_others, standing_in
from solvers.delayed.base import Delayed, DelayedProgram, Flight, tensor_bytes
from solvers.exact.micro_batches import MicroBatch
from solvers.state import Tensors, entries

LOST_A_STEP = 0.27
"""Of an exact step's progress, for every step by which the first block's gradients are late.

Measured up to a delay of one step, in short trainings at a high learning rate, where it is most:
docs/benchmarks/delays/accuracy.md.
"""


@dataclass(frozen=True)
class DDG(Delayed):
    r"""Decoupled parallel back-propagation with delayed gradients (Huo et al., arXiv 1804.10574).

    `Delayed` with d_k = K-1-k; the gradient of a micro-batch is taken at the weights its forward
    pass had. Block k keeps d_k graphs, and ceil(d_k / m) versions of its weights beside the newest,
    each shared by the micro-batches that met it.
    """

    name: ClassVar[str] = "ddg"

    def progress(self, count: int, size: int) -> float | None:
        steps = self.delay(0, count) / self.parts(size)
        return 1 - LOST_A_STEP * steps if steps <= 1 else None

    def versions(self, index: int, count: int, size: int) -> int:
        return ceil(self.delay(index, count) / self.parts(size))

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        graphs = (self.delay(index, count) + 1) * graph(module, self.first_part(lam))
        older = self.versions(index, count, len(lam))
        return graphs + older * tensor_bytes(module.parameters())


@program_of(DDG)
class StashingProgram(DelayedProgram):
    """Keeps the graph of every flight, over the version of the weights that it met."""

    def begin(self) -> None:
        super().begin()
        self._newest: Tensors | None = None
        self._buffered = has_others(self.block.module.modules())

    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        flight = Flight(part, self._leaf(lam), weights=self._version())
        with (
            captured_buffers(self.block.module)
            if self._buffered
            else nullcontext(Tensors()) as buffers
        ):
            out = self._compute(flight)
        flight.stash = {f"buffer {name}": buffer for name, buffer in buffers.items()}
        for earlier in self._flights:  # what moves now they have met as it was
            earlier.stash = flight.stash | earlier.stash
        self._up(out.detach())
        return flight

    def _version(self) -> Tensors:
        """The weights as they are, in the parameters' own memory, to be differentiated by."""
        if self._newest is None:
            # .data has a count of its own of changes in place: autograd would take a step for one
            self._newest = {
                name: p.data.requires_grad_(p.requires_grad)
                for name, p in self.block.module.named_parameters()
            }
        return self._newest

    def _compute(self, flight: Flight) -> Tensor:
        assert flight.lam is not None
        flight.out = self.block.forward(flight.lam, flight.part.key, flight.weights)
        return flight.out

    def _again(self, flight: Flight) -> Flight:
        assert flight.weights is not None
        for name, parameter in self.block.module.named_parameters():
            flight.weights[name].requires_grad_(parameter.requires_grad)
        flight.lam = self._leaf(flight.lam)
        module, buffers = self.block.module, entries(flight.stash, "buffer ")
        with frozen_statistics(module), standing_in(module, buffers):
            self._compute(flight)
        return flight

    def _backward(self, flight: Flight) -> None:
        assert flight.out is not None
        assert flight.lam is not None
        assert flight.weights is not None
        p_out = self._adjoint(flight.part, flight.out.dtype)
        parameters = list(self.block.module.named_parameters())
        # the mini-batch's sum goes along from version to version
        for name, parameter in parameters:
            flight.weights[name].grad, parameter.grad = parameter.grad, None
        self.block.backward(flight.out, p_out, key=flight.part.key)
        for name, parameter in parameters:
            parameter.grad, flight.weights[name].grad = flight.weights[name].grad, None
        self._finish(flight.part, flight.lam)

    def _step(self, part: MicroBatch) -> None:
        if part.ends:
            self._set_apart()
        super()._step(part)

    def _set_apart(self) -> None:
        """Leave the weights' memory to the flights that have met them, if any: they will move."""
        if any(flight.weights is self._newest for flight in self._flights):
            for parameter in self.block.module.parameters():
                parameter.data = parameter.data.clone()
        self._newest = None
