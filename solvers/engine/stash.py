"""The stash of weight versions and buffers that later backward passes need."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from hybrid.solvers.numerics.attributes import user_modules
from hybrid.solvers.numerics.buffers import (
    captured_buffers,
    frozen_statistics,
    has_changing_buffers,
    replaced_buffers,
)
from hybrid.solvers.state import Tensors


class Stash:
    """Weight stashing (PipeDream, arXiv 1806.03377) without a copy for every micro-batch.

    A forward pass uses the weights in the parameters' own memory, under a second name that its
    graph refers to. A step that would change this memory leaves it to the micro-batches whose
    backward pass still needs it, and gives the parameters a copy to change. So micro-batches that
    used the same weights share one version, and a version that nobody needs costs nothing.
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

    def newest_version(self) -> Tensors:
        """The newest weights, for a forward pass; `release` them in its backward pass."""
        parameters, newest = self.parameters.items(), self._newest
        if any(n not in newest or newest[n].data_ptr() != p.data_ptr() for n, p in parameters):
            # .data counts its changes by itself: autograd would take a step for an error
            newest = {name: nn.Parameter(p.data, p.requires_grad) for name, p in parameters}
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

        The weights take gradients where the parameters do.
        """
        for name, parameter in self.parameters.items():
            weights[name].requires_grad_(parameter.requires_grad)
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
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        self._newest, self._users = {}, 0


class CopyingStash(Stash):
    """Copies the weights for every forward pass, while a step may be changing them."""

    def newest_version(self) -> Tensors:
        parameters = self.parameters.items()
        return {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in parameters}
