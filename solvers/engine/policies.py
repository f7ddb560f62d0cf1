"""What a backward pass runs on: the graph of the forward pass, older weights, or the newest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.layers.bundle import Crossing, each
from hybrid.solvers.numerics.attributes import user_modules
from hybrid.solvers.numerics.buffers import (
    captured_buffers,
    frozen_statistics,
    has_changing_buffers,
    replaced_buffers,
)
from hybrid.solvers.state import Tensors

Receive = Callable[[Any], Any]
"""Gives p_{k+1} of the flight for an output of that type, or for several of such types; None on the
last block, and where neither it nor one before it is trained."""


def dtypes(x: Crossing) -> Any:
    """The type of a tensor, or those of several."""
    return each(lambda tensor: tensor.dtype, x)


class Stash:
    """Weight stashing (PipeDream, arXiv 1806.03377) without a copy for every micro-batch.

    A forward pass uses the weights in the parameters' own memory, under a second name that its
    graph refers to. A step that would change this memory leaves it to the micro-batches whose
    backward pass still needs it, and gives the parameters a copy to change. So micro-batches that
    used the same weights share one version, and a version that nobody needs costs nothing. Frozen
    parameters, which no step changes, are of no version.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], parts: Container[str] = ()
    ) -> None:
        """`parts`: the names of the module's children that the passes go through; empty: all."""
        self.module, self.parameters, self.parts = module, parameters, parts
        self._newest: Tensors = {}
        self._users = 0
        """Micro-batches under way whose forward pass used the newest version."""
        self._moving = has_changing_buffers(module.modules()) or bool(user_modules(module))
        """Whether forward passes may change plain attributes, or buffers other than BatchNorm's."""
        self._buffers: dict[int, Tensors] = {}
        """Those of each micro-batch under way, if passes may change any."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that a step may change."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def newest_version(self) -> Tensors:
        """The newest weights, for a forward pass; `release` them in its backward pass."""
        trained, newest = self.trained, self._newest
        memory = {name: weight.data_ptr() for name, weight in newest.items()}
        if memory != {name: p.data_ptr() for name, p in trained.items()}:
            # .data counts its changes by itself: autograd would take a step for an error
            newest = {name: nn.Parameter(p.data) for name, p in trained.items()}
            self._newest, self._users = newest, 0
        self._users += 1
        return newest

    @contextmanager
    def forward_pass(self, buffers: Tensors) -> Iterator[None]:
        """Around a forward pass: the buffers that it changes are put into `buffers` as they were.

        They are put into those of all earlier micro-batches under way, too.
        """
        if not self._moving:
            yield
            return
        with captured_buffers(self.module, first=self.parts) as changed:
            yield
        self._buffers[id(buffers)] = buffers
        for earlier in [*self._buffers.values()]:
            for name, buffer in changed.items():
                earlier.setdefault(name, buffer)

    @contextmanager
    def repeated_pass(self, weights: Tensors, buffers: Tensors) -> Iterator[None]:
        """Around a forward pass that a resume repeats, with the weights and buffers of the first.

        The weights take gradients where the parameters do. What was frozen then is as it was.
        """
        for name in weights.keys() & self.parameters.keys():
            weights[name].requires_grad_(self.parameters[name].requires_grad)
        for name in self.trained.keys() - weights.keys():
            weights[name] = nn.Parameter(self.parameters[name].detach().clone())
        with frozen_statistics(self.module), replaced_buffers(self.module, buffers):
            yield
        self.follow(buffers)

    def follow(self, buffers: Tensors) -> None:
        """Put into `buffers` what later forward passes change, as it was before."""
        if self._moving:
            self._buffers[id(buffers)] = buffers

    def release(self, version: Tensors, buffers: Tensors) -> None:
        """The backward pass of a micro-batch needs this version and these buffers no longer."""
        self._buffers.pop(id(buffers), None)
        if version is self._newest:
            self._users -= 1

    def before_step(self) -> None:
        """Leave the weights' memory to the micro-batches that need it, if there are any."""
        if self._users:
            trained = [*self.trained.values()]
            old = [parameter.data for parameter in trained]
            new = [torch.empty_like(each) for each in old]
            if new:
                torch._foreach_copy_(new, old)  # one launch on a GPU
            for parameter, copy in zip(trained, new, strict=True):
                parameter.data = copy
        self._newest, self._users = {}, 0


class BackwardPolicy(ABC):
    """How a block goes forward, what it keeps, and what its backward pass runs on."""

    outputs_are_lost = False
    """Whether x_k has to be kept for its record, since no later pass computes it again."""
    eager = ""
    """Why its passes are not recorded as graphs, where that was asked for."""

    def __init__(self, block: Block) -> None:
        self.block = block

    @abstractmethod
    def forward(self, flight: Flight) -> Any:
        """Compute x_k, and keep in the flight what the backward pass needs."""

    @abstractmethod
    def backward(self, flight: Flight, receive: Receive) -> Crossing | None:
        """Receive p_{k+1} and add the gradient; p_k, or None if nobody needs it."""

    def before_step(self) -> None:  # noqa: B027
        """Prepare for a step, which changes the parameters in place."""

    def restore(self, flight: Flight) -> None:  # noqa: B027
        """Make a flight of a checkpoint ready for its backward pass."""

    def compute(self, flight: Flight) -> Any:
        """f_k(lam_k; w_k) at the flight's version of the weights, or the newest."""
        return self.block.forward(flight.lam, flight.part.key, flight.weights, apart=True)

    def input_adjoint(self, flight: Flight) -> Crossing | None:
        """p_k, as a backward pass has left it at lam_k; None if nobody needs it."""
        assert flight.lam is not None
        return self.block.input_adjoint(flight.lam) if self.block.sends_adjoint else None


class KeepGraph(BackwardPolicy):
    """Backward passes run on the forward pass's graph; no step comes between the two."""

    def forward(self, flight: Flight) -> Any:
        flight.out = self.compute(flight)
        return flight.out

    def backward(self, flight: Flight, receive: Receive) -> Crossing | None:
        assert flight.out is not None
        p_out = receive(dtypes(flight.out))
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

    def forward(self, flight: Flight) -> Any:
        flight.weights = self.stash.newest_version()
        keeps = torch.set_grad_enabled(not self.recompute)
        with keeps, self.stash.forward_pass(flight.buffers):
            out = self.compute(flight)
        flight.out = None if self.recompute else out
        return out

    def backward(self, flight: Flight, receive: Receive) -> Crossing | None:
        if flight.out is None:
            with self._repeated_pass(flight):
                flight.out = self.compute(flight)
        out, version = flight.out, flight.weights
        assert version is not None
        p_out = receive(dtypes(out))
        # the mini-batch's sum of gradients moves to this version and back
        pairs = [(self.stash.parameters[name], weight) for name, weight in version.items()]
        for parameter, weight in pairs:
            weight.grad, parameter.grad = parameter.grad, None
        with self.block.replaced(version):
            self.block.backward(out, p_out, key=flight.part.key)
        for parameter, weight in pairs:
            parameter.grad, weight.grad = weight.grad, None
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

    def forward(self, flight: Flight) -> Any:
        with torch.no_grad(), self.stash.forward_pass(flight.buffers):
            return self.compute(flight)

    def backward(self, flight: Flight, receive: Receive) -> Crossing | None:
        with self.stash.repeated_pass({}, flight.buffers):
            flight.out = self.compute(flight)
        p_out = receive(dtypes(flight.out))
        self.block.backward(flight.out, p_out, key=flight.part.key)
        self.stash.release({}, flight.buffers)
        return self.input_adjoint(flight)


class Replay(BackwardPolicy):
    """Backward passes run on a forward pass that is replayed at the newest weights.

    The replay updates BatchNorm's running statistics; the first pass does not.
    """

    outputs_are_lost = True

    def forward(self, flight: Flight) -> Any:
        with torch.no_grad(), frozen_statistics(self.block.module):
            return self.compute(flight)

    def backward(self, flight: Flight, receive: Receive) -> Crossing | None:
        # the adjoint may still be on its way: it is received after the replay
        flight.out = self.compute(flight)
        p_out = receive(dtypes(flight.out))
        self.block.backward(flight.out, p_out, key=flight.part.key)
        return self.input_adjoint(flight)
