"""The stash of weight versions and buffers that later backward passes need."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.numerics.attributes import user_modules
from hybrid.solvers.numerics.buffers import (
    captured_buffers,
    frozen_statistics,
    has_changing_buffers,
    replaced_buffers,
)
from hybrid.solvers.numerics.group_rates import rate_of_tensor, rate_to_tensor
from hybrid.solvers.state import Tensors, entries


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
        own, newest = self.parameters, self._newest
        if any(n not in newest or newest[n].data_ptr() != p.data_ptr() for n, p in own.items()):
            # .data counts its changes by itself: autograd would take a step for an error
            newest = {name: nn.Parameter(p.data, p.requires_grad) for name, p in own.items()}
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
        own = self.parameters.items()
        return {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in own}


@dataclass
class Flight:
    """A micro-batch whose forward pass a block has done and whose backward pass is yet to come."""

    part: MicroBatch
    lam: Tensor | None = None
    """The input of its forward pass, if the backward pass needs it."""
    stash: Tensors = field(default_factory=dict)
    """What else its backward pass needs, for a checkpoint."""
    weights: Tensors | None = None
    """The version of the weights that its forward pass used, if the backward pass needs it."""
    buffers: Tensors = field(default_factory=dict)
    """The buffers that passes have changed since, as its forward pass found them."""
    out: Tensor | None = None
    """x_k with its graph, if that is kept."""
    p_out: Tensor | None = None
    """p_{k+1}, once it has arrived."""
    x: Tensor | None = None
    """x_k alone, if it is to be recorded and no later pass could compute it again."""


def save_flights(flights: Iterable[Flight]) -> Tensors:
    """All flights as named tensors; a version of the weights that several share is there once."""
    found: Tensors = {}
    versions: list[Tensors] = []
    for i, flight in enumerate(flights):
        own = {"part": torch.tensor(flight.part[:6])}
        own["rate"] = rate_to_tensor(flight.part.learning_rate)
        for name, tensor in (("lam", flight.lam), ("x", flight.x)):
            if tensor is not None:
                own[name] = tensor
        if flight.weights is not None:
            if not versions or flight.weights is not versions[-1]:
                versions.append(flight.weights)
            own["version"] = torch.tensor(len(versions) - 1)
        own |= flight.stash | {f"buffer {name}": b for name, b in flight.buffers.items()}
        found |= {f"flight {i}.{name}": tensor.detach() for name, tensor in own.items()}
    for v, weights in enumerate(versions):
        found |= {f"version {v}.{name}": w.detach() for name, w in weights.items()}
    return found


def load_flights(found: Tensors, module: nn.Module) -> Iterator[Flight]:
    """The flights that `save_flights` wrote, oldest first; their graphs are not there yet."""
    versions: dict[int, Tensors] = {}
    for i in range(len({name.partition(".")[0] for name in found if name[:6] == "flight"})):
        own = entries(found, f"flight {i}.")
        part = MicroBatch(*own.pop("part").tolist())
        rate = rate_of_tensor(own.pop("rate"))
        flight = Flight(part._replace(learning_rate=rate), own.pop("lam", None))
        flight.x = own.pop("x", None)
        if "version" in own:
            v = int(own.pop("version"))
            if v not in versions:
                loaded = with_parameter_strides(module, entries(found, f"version {v}."))
                versions[v] = {n: nn.Parameter(w, requires_grad=False) for n, w in loaded.items()}
            flight.weights = versions[v]
        flight.buffers = entries(own, "buffer ")
        flight.stash = {name: t for name, t in own.items() if not name.startswith("buffer ")}
        yield flight


def with_parameter_strides(module: nn.Module, tensors: Tensors) -> Tensors:
    """Tensors named like parameters, laid out as these are.

    With a single channel two layouts look alike to torch, but kernels round differently.
    """
    like = {name: module.get_parameter(name).detach() for name in tensors}
    return {name: torch.empty_like(like[name]).copy_(t) for name, t in tensors.items()}
