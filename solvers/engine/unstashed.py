"""Backward passes at the newest weights with the activations of the forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.policies import BackwardPolicy, Receive, Stash, dtypes
from hybrid.solvers.layers.bundle import Crossing
from hybrid.solvers.numerics.buffers import replaced_buffers
from hybrid.solvers.numerics.weights import NothingRecomputed
from hybrid.solvers.state import Tensors


class KeepActivations(BackwardPolicy):
    """Backward passes run on the forward pass's activations and the newest weights.

    A graph refers to the parameters themselves, which a step changes in place: autograd, which
    would call that an error, leaves what hooks hold to them. No later pass can compute the
    activations of a flight again, so a checkpoint holds them.
    """

    outputs_are_lost = True

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.stash = Stash(block.module, {})
        """Of buffers alone."""
        self._checked = False
        """Whether a backward pass has been seen to make no part of its forward pass again."""

    def forward(self, flight: Flight) -> Any:
        keep = activations_kept(self.block.module, flight.stash)
        with keep, self.stash.forward_pass(flight.buffers):
            flight.out = self.compute(flight)
        return flight.out

    def backward(self, flight: Flight, receive: Receive) -> Crossing | None:
        assert flight.out is not None
        self.stash.release({}, flight.buffers)
        p_out = receive(dtypes(flight.out))
        flight.stash = {}  # the graph lets them go one by one
        # once: the mode slows each operation
        with nullcontext() if self._checked else NothingRecomputed("solver.stash=true"):
            self.block.backward(flight.out, p_out, key=flight.part.key)
        self._checked = True
        return self.input_adjoint(flight)

    def restore(self, flight: Flight) -> None:
        module = self.block.module
        # the same pass in all it keeps, but for good it changes no statistics
        buffers = dict(module.named_buffers(remove_duplicate=False)) | flight.buffers
        with replaced_buffers(module, buffers), activations_replaced(module, flight.stash):
            flight.out = self.compute(flight)
        self.stash.follow(flight.buffers)


Saved = tuple[Tensor, int | None]
"""What a graph holds, and the count of its changes; None: they do not matter."""


@contextmanager
def activations_kept(module: nn.Module, activations: Tensors) -> Iterator[None]:
    """Around a forward pass: gives what its graph keeps beside the parameters, in order."""
    weights = _storages(module)

    def pack(tensor: Tensor) -> Saved:
        value = tensor.detach()
        if _storage(tensor) in weights:
            return value, None
        activations[f"activation {len(activations):05}"] = value
        return value, value._version

    with saved_tensors_hooks(pack, _unpack):
        yield


@contextmanager
def activations_replaced(module: nn.Module, activations: Tensors) -> Iterator[None]:
    """Around the same pass at other weights: its graph keeps these activations instead.

    ValueError if the pass keeps others, as one whose path depends on its weights may.
    """
    weights, remaining = _storages(module), iter(activations.copy().items())
    refusal = ValueError(
        "the checkpoint holds other activations under way than a forward pass keeps: resume with "
        "solver.stash=true from the end of an epoch, or with the network of the run"
    )

    def pack(tensor: Tensor) -> Saved:
        if _storage(tensor) in weights:
            return tensor.detach(), None
        name, value = next(remaining, ("", None))
        if value is None or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise refusal
        # kernels round by strides, which a checkpoint does not keep
        activations[name] = torch.empty_like(tensor).copy_(value)
        return activations[name], None

    with saved_tensors_hooks(pack, _unpack):
        yield
    if next(remaining, None) is not None:
        raise refusal


def _unpack(saved: Saved) -> Tensor:
    tensor, version = saved
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
