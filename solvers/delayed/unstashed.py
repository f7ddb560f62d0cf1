"""Backward passes at the newest weights, with the activations of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybrid.solvers.blocks.buffers import replaced_buffers
from hybrid.solvers.delayed.base import DelayedProgram
from hybrid.solvers.delayed.flights import Flight
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.state import Tensors

Held = tuple[Tensor, int | None]
"""What a graph holds, and the count of its changes; None: they do not matter."""


class UnstashedProgram(DelayedProgram):
    """Keeps every flight's graph, over the parameters themselves.

    A step changes the parameters in place, and a graph takes them as they are: autograd, which
    would call that an error, leaves what hooks hold to them. No later pass can compute the
    activations of a flight again, so a checkpoint holds them.
    """

    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        flight = Flight(part, self._leaf(lam))
        with activations_kept(self.block.module, flight.stash):
            out = self._compute(flight)
        self._send_output(out.detach())
        return flight

    def _compute(self, flight: Flight) -> Tensor:
        assert flight.lam is not None
        flight.out = self.block.forward(flight.lam, flight.part.key)
        return flight.out

    def _rebuild(self, flight: Flight) -> Flight:
        flight.lam = self._leaf(flight.lam)
        module = self.block.module
        # the same pass in all it keeps, but for good it changes no statistics
        buffers = dict(module.named_buffers(remove_duplicate=False))
        with replaced_buffers(module, buffers), activations_replaced(module, flight.stash):
            self._compute(flight)
        return flight

    def _backward(self, flight: Flight) -> None:
        assert flight.lam is not None
        assert flight.out is not None
        p_out = self._receive_adjoint(flight.part, flight.out.dtype)
        flight.stash = {}  # the graph lets them go one by one
        self.block.backward(flight.out, p_out, key=flight.part.key)
        self._finish(flight.part, flight.lam)


@contextmanager
def activations_kept(module: nn.Module, kept: Tensors) -> Iterator[None]:
    """Around a forward pass: `kept` gets what its graph keeps beside the parameters, in order."""
    weights = _storages(module)

    def pack(tensor: Tensor) -> Held:
        own = tensor.detach()
        if _storage(tensor) in weights:
            return own, None
        kept[f"activation {len(kept):05}"] = own
        return own, own._version

    with saved_tensors_hooks(pack, _unpack):
        yield


@contextmanager
def activations_replaced(module: nn.Module, kept: Tensors) -> Iterator[None]:
    """Around the same pass at other weights: its graph keeps those of `kept` in place of its own.

    ValueError if the pass keeps others, as one whose path depends on its weights may.
    """
    weights, left = _storages(module), iter(kept.copy().items())

    def pack(tensor: Tensor) -> Held:
        if _storage(tensor) in weights:
            return tensor.detach(), None
        name, value = next(left, ("", None))
        if value is None or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(_OTHERS)
        # kernels round by strides, which a checkpoint does not keep
        kept[name] = torch.empty_like(tensor).copy_(value)
        return kept[name], None

    with saved_tensors_hooks(pack, _unpack):
        yield
    if next(left, None) is not None:
        raise ValueError(_OTHERS)


_OTHERS = (
    "the checkpoint holds other activations under way than a forward pass keeps: resume with "
    "solver.stash=true from the end of an epoch, or with the network of the run"
)


def _unpack(held: Held) -> Tensor:
    tensor, version = held
    if version not in (None, tensor._version):
        raise RuntimeError(
            f"an activation {tuple(tensor.shape)} that the backward pass needs was changed in "
            "place after its forward pass"
        )
    return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(module: nn.Module) -> set[int]:
    return {_storage(p) for p in module.parameters()}
