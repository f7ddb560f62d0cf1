"""What a backward pass runs on: the graph of the forward pass, older weights, or the newest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.stash import Stash
from hybrid.solvers.numerics.buffers import frozen_statistics

Receive = Callable[[torch.dtype], Tensor | None]
"""Gives p_{k+1} of the flight for an output of that type; None on the last block."""


class BackwardPolicy(ABC):
    """How a block goes forward, what it keeps, and what its backward pass runs on."""

    outputs_are_lost = False
    """Whether x_k has to be kept for its record, since no later pass computes it again."""

    def __init__(self, block: Block) -> None:
        self.block = block

    @abstractmethod
    def forward(self, flight: Flight) -> Tensor:
        """Compute x_k, and keep in the flight what the backward pass needs."""

    @abstractmethod
    def backward(self, flight: Flight, receive: Receive) -> Tensor | None:
        """Receive p_{k+1} and add the gradient; p_k, or None on the first block."""

    def before_step(self) -> None:  # noqa: B027
        """Prepare for a step, which changes the parameters in place."""

    def restore(self, flight: Flight) -> None:  # noqa: B027
        """Make a flight of a checkpoint ready for its backward pass."""

    def compute(self, flight: Flight) -> Tensor:
        """f_k(lam_k; w_k) at the flight's version of the weights, or the newest."""
        out: Tensor = self.block.forward(flight.lam, flight.part.key, flight.weights)
        return out

    def input_adjoint(self, flight: Flight) -> Tensor | None:
        """p_k, as a backward pass has left it at lam_k; None on the first block."""
        assert flight.lam is not None
        return None if self.block.first else self.block.input_adjoint(flight.lam)


class KeepGraph(BackwardPolicy):
    """Backward passes run on the forward pass's graph; no step comes between the two."""

    def forward(self, flight: Flight) -> Tensor:
        flight.out = self.compute(flight)
        return flight.out

    def backward(self, flight: Flight, receive: Receive) -> Tensor | None:
        assert flight.out is not None
        p_out = receive(flight.out.dtype)
        self.block.backward(flight.out, p_out, key=flight.part.key)
        return self.input_adjoint(flight)


class StashWeights(BackwardPolicy):
    """Backward passes run on the graph over the version of the weights that the forward used.

    With `recompute` a flight keeps its input alone, and the graph is made again at that version.
    """

    def __init__(self, block: Block, recompute: bool) -> None:
        super().__init__(block)
        self.recompute = recompute
        self.stash = Stash(block.module, dict(block.module.named_parameters()))

    def forward(self, flight: Flight) -> Tensor:
        flight.weights = self.stash.newest_version()
        keeps = torch.set_grad_enabled(not self.recompute)
        with keeps, self.stash.forward_pass(flight.buffers):
            out = self.compute(flight)
        flight.out = None if self.recompute else out
        return out

    def backward(self, flight: Flight, receive: Receive) -> Tensor | None:
        if flight.out is None:
            with self._repeated_pass(flight):
                flight.out = self.compute(flight)
        out, version = flight.out, flight.weights
        assert version is not None
        p_out = receive(out.dtype)
        # the mini-batch's sum of gradients moves to this version and back
        for name, parameter in self.stash.parameters.items():
            version[name].grad, parameter.grad = parameter.grad, None
        with self.block.replaced(version):
            self.block.backward(out, p_out, key=flight.part.key)
        for name, parameter in self.stash.parameters.items():
            parameter.grad, version[name].grad = version[name].grad, None
        self.stash.release(version, flight.buffers)
        return self.input_adjoint(flight)

    def before_step(self) -> None:
        self.stash.before_step()

    def restore(self, flight: Flight) -> None:
        with self._repeated_pass(flight):
            flight.out = None if self.recompute else self.compute(flight)

    def _repeated_pass(self, flight: Flight) -> AbstractContextManager[None]:
        assert flight.weights is not None
        return self.stash.repeated_pass(flight.weights, flight.buffers)


class Recompute(BackwardPolicy):
    """Backward passes run on a graph that is made again: the weights are still the same."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.stash = Stash(block.module, {})
        """Of buffers alone."""

    def forward(self, flight: Flight) -> Tensor:
        with torch.no_grad(), self.stash.forward_pass(flight.buffers):
            return self.compute(flight)

    def backward(self, flight: Flight, receive: Receive) -> Tensor | None:
        with self.stash.repeated_pass({}, flight.buffers):
            flight.out = self.compute(flight)
        p_out = receive(flight.out.dtype)
        self.block.backward(flight.out, p_out, key=flight.part.key)
        self.stash.release({}, flight.buffers)
        return self.input_adjoint(flight)


class Replay(BackwardPolicy):
    """Backward passes run on a forward pass that is replayed at the newest weights.

    The replay updates BatchNorm's running statistics; the first pass does not.
    """

    outputs_are_lost = True

    def forward(self, flight: Flight) -> Tensor:
        with torch.no_grad(), frozen_statistics(self.block.module):
            return self.compute(flight)

    def backward(self, flight: Flight, receive: Receive) -> Tensor | None:
        # the adjoint may still be on its way: it is received after the replay
        flight.out = self.compute(flight)
        p_out = receive(flight.out.dtype)
        self.block.backward(flight.out, p_out, key=flight.part.key)
        return self.input_adjoint(flight)
