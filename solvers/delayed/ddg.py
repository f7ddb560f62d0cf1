"""DDG: delayed gradients at stashed weights (Huo et al., arXiv 1804.10574)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybrid.solvers.acting import Needs
from hybrid.solvers.base import GraphBytes, Links, Program, Setup, program_of
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import SEVERAL_BLOCKS, Delayed, DelayedProgram, tensor_bytes
from hybrid.solvers.delayed.stash import Flight, Stash
from hybrid.solvers.numerics.buffers import replaced_buffers
from hybrid.solvers.numerics.weights import NothingRecomputed
from hybrid.solvers.state import Tensors

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
    waits: ClassVar[bool] = True

    stash: Annotated[bool, SEVERAL_BLOCKS, FLOAT32] = True
    """Weight stashing: backward passes use their forward pass's weights; false: the newest."""
    recompute: Annotated[bool, SEVERAL_BLOCKS, STASHES] = False
    """Gradient checkpointing: keep only block inputs and recompute; same bits."""

    @property
    def replays(self) -> bool:
        return self.recompute

    def start(self, block: Block, links: Links, setup: Setup) -> Program:
        kind = self.program if self.stash else UnstashedProgram
        return kind(self, block, links, setup)

    def progress(self, count: int, size: int, optimizer: str = "sgd") -> float | None:
        lost, late = LOST.get(optimizer, LOST["adamw"]), self.steps_late(0, count, size)
        for (a, low), (b, high) in pairwise(zip(DELAYS, lost, strict=False)):
            if a <= late <= b:
                return 1 - low - (high - low) * (late - a) / (b - a)
        return None

    def versions(self, index: int, count: int, size: int) -> int:
        if not self.stash:
            return 0
        return ceil(self.delay(index, count) / self.num_micro_batches(size, count))

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, d = self.first_part(lam, count), self.delay(index, count)
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

    def _forward(self, flight: Flight) -> Tensor:
        flight.weights = self._stash.newest_version()
        keeps = torch.set_grad_enabled(not self.solver.recompute)
        with keeps, self._stash.forward_pass(flight.buffers):
            out = self._compute(flight)
        flight.out = None if self.solver.recompute else out
        return out.detach()

    def _repeated_pass(self, flight: Flight) -> AbstractContextManager[None]:
        assert flight.weights is not None
        return self._stash.repeated_pass(flight.weights, flight.buffers)

    def _rebuild(self, flight: Flight) -> Flight:
        with self._repeated_pass(flight):
            flight.out = None if self.solver.recompute else self._compute(flight)
        return flight

    def _backward(self, flight: Flight) -> Tensor | None:
        out = flight.out
        if out is None:
            with self._repeated_pass(flight):
                out = flight.out = self._compute(flight)
        assert flight.weights is not None
        p_out = self._receive_adjoint(flight, out.dtype)
        # the mini-batch's sum of gradients moves to this version and back
        for name, parameter in self._stash.parameters.items():
            flight.weights[name].grad, parameter.grad = parameter.grad, None
        with self.block.replaced(flight.weights):
            self.block.backward(out, p_out, key=flight.part.key)
        for name, parameter in self._stash.parameters.items():
            parameter.grad, flight.weights[name].grad = flight.weights[name].grad, None
        self._stash.release(flight.weights, flight.buffers)
        return self._input_adjoint(flight)

    def _step(self, flight: Flight) -> None:
        self._stash.before_step()
        super()._step(flight)


class UnstashedProgram(DelayedProgram):
    """Keeps every flight's graph, over the parameters themselves.

    A step changes the parameters in place, and a graph takes them as they are: autograd, which
    would call that an error, leaves what hooks hold to them. No later pass can compute the
    activations of a flight again, so a checkpoint holds them.
    """

    _looked = False
    """Whether a backward pass has been seen to make no part of its forward pass again."""

    def begin(self) -> None:
        super().begin()
        self._stash = Stash(self.block.module, {})
        """Of buffers alone."""

    def _forward(self, flight: Flight) -> Tensor:
        kept = activations_kept(self.block.module, flight.stash)
        with kept, self._stash.forward_pass(flight.buffers):
            flight.out = self._compute(flight)
        x = flight.out.detach()
        flight.x = None if self.filling is None else x
        return x

    def _rebuild(self, flight: Flight) -> Flight:
        module = self.block.module
        # the same pass in all it keeps, but for good it changes no statistics
        buffers = dict(module.named_buffers(remove_duplicate=False)) | flight.buffers
        with replaced_buffers(module, buffers), activations_replaced(module, flight.stash):
            flight.out = self._compute(flight)
        self._stash.follow(flight.buffers)
        return flight

    def _backward(self, flight: Flight) -> Tensor | None:
        assert flight.out is not None
        self._stash.release({}, flight.buffers)
        p_out = self._receive_adjoint(flight, flight.out.dtype)
        flight.stash = {}  # the graph lets them go one by one
        # once: the mode slows each operation
        with nullcontext() if self._looked else NothingRecomputed():
            self.block.backward(flight.out, p_out, key=flight.part.key)
        self._looked = True
        return self._input_adjoint(flight)


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
    """Around the same pass at other weights: its graph keeps these activations, not its own.

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
