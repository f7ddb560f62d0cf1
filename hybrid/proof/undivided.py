"""One pass of the undivided network by plain torch, the reference for a run's gradient."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybrid.networks.units import mode
from hybrid.solvers.checks.constant_draws import ConstantDraws, UnknownDrawError
from hybrid.solvers.checks.part_norms import NoRowsError, Parts, normalized_by_parts
from hybrid.solvers.checks.traces import enclosed, holders, untraced
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.metrics import FAULTS, failure
from hybrid.solvers.numerics.attributes import attributes, numbers_in, user_modules
from hybrid.solvers.numerics.regularizer import Function
from hybrid.solvers.numerics.weights import trained_bytes
from hybrid.solvers.objective import Loss

PROJECTIONS = 16
WIDTH = 1 << 12
"""Numbers of a tensor that one row of signs is for."""

MOST_MEMORY = os.sysconf("SC_PAGE_SIZE") / 4
"""Bytes of all gradients for each page of this machine: a system may end who asks for more."""

Sketches = dict[str, Tensor]
"""By name of a tensor: its norm, then its products with random signs, (1 + PROJECTIONS,)."""


class UnprovenError(Exception):
    """The undivided pass cannot be made, for a reason that is no fault of the run."""


@dataclass
class PassResult:
    """What a pass over some rows has left."""

    loss: float = 0.0
    loss_format: torch.dtype = torch.float64
    """transformers computes losses in float32, whatever the format of the weights is."""
    gradients: Sketches = field(default_factory=dict)
    """By name of a parameter that has a gradient."""
    buffers: Sketches = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    """By their names in the network: plain attributes that count passes, as the pass left them."""


def sketch(name: str, x: Tensor) -> Tensor:
    """<x, s_j> for signs s_j that follow from the name, after the norm of x.

    For two tensors of a name E (<x, s> - <y, s>)^2 = ||x - y||^2. Signs of a row and of the rows
    are multiplied, so that few are drawn.
    """
    x = x.detach()
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    flat = flat if flat.dtype is torch.float64 else flat.float()
    width = min(WIDTH, flat.numel())
    if not width:
        return torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    height = ceil(flat.numel() / width)
    random = torch.Generator().manual_seed(crc32(name.encode()))
    inner, outer = (
        (2 * torch.randint(2, (n, PROJECTIONS), generator=random) - 1).to(flat)
        for n in (width, height)
    )
    missing = height * width - flat.numel()
    rows = (nn.functional.pad(flat, (0, missing)) if missing else flat).view(height, width)
    products = ((rows @ inner).double() * outer).sum(0)
    norms = [some.double().norm() for some in rows.split(WIDTH // 16)]  # a whole copy is large
    return torch.cat([torch.stack(norms).norm().view(1), products]).cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """An estimate of ||x - y|| from the sketches of x and y; inf where one is not finite."""
    apart = (one - other)[1:].square().mean().sqrt()
    return float(apart) if apart.isfinite() else float("inf")


@dataclass(frozen=True)
class UndividedPass:
    """One pass of the undivided network over a mini-batch of training samples."""

    model: nn.Module
    loss: Loss
    regularizer: Function | None
    inputs: Any
    targets: Any
    parts: Parts
    """The rows of the parts in which the run will divide the mini-batch."""

    def run(self, device: torch.device) -> PassResult:
        """Loss, gradients, buffers and counting attributes after the pass.

        The network, its gradients and the loss are afterwards what they were. UnprovenError, with
        the reason, where that cannot be.
        """
        model, functions = self.model, (self.loss, self.regularizer)
        gradients = trained_bytes(model)
        modules = {id(module) for module in model.modules()}
        try:
            if device.type == "cpu" and gradients > MOST_MEMORY * os.sysconf("SC_PHYS_PAGES"):
                raise MemoryError
            with mode(model, True), without_gradients(model), untraced(functions, modules):
                model.to(device)
                return self._compute()
        except (UnknownDrawError, NoRowsError) as error:
            raise UnprovenError(str(error)) from error
        except (MemoryError, *FAULTS) as error:
            full = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if full or "not enough memory" in str(error):  # torch's allocator for CPUs
                raise UnprovenError("the undivided network does not fit into the memory") from error
            raise ValueError(f"a pass of the undivided network fails: {failure(error)}") from error

    def _compute(self) -> PassResult:
        before = attributes_of(self.model)
        functions = {"the loss": self.loss, "the regularizer": self.regularizer}
        states = {what: _state_of(function, self.model) for what, function in functions.items()}
        count = len(tree_leaves(self.targets)[0])

        def outputs() -> Any:
            with ConstantDraws(), normalized_by_parts(self.model, self.parts, count):
                # a network may write to its inputs
                return call_network(self.model, tree_map_only(Tensor, Tensor.clone, self.inputs))

        with torch.enable_grad():
            out = outputs()
            with ConstantDraws():
                value = self.loss(out, self.targets)
                value = value.mean() if value.dim() else value
                total = value
                if self.regularizer is not None:
                    total = total + self.regularizer(dict(self.model.named_parameters()))
                done = PassResult(float(value.detach()), value.dtype)
                with _sketched_gradients(self.model, done.gradients):
                    total.backward()  # which may make passes again
            for what, function in functions.items():
                _check_state(what, states[what], _state_of(function, self.model))
            done.buffers = {n: sketch(n, b) for n, b in self.model.named_buffers() if not b.is_meta}
            after = attributes_of(self.model)
            moved = {name: x for name, x in after.items() if unlike(x, before.get(name))}
            if moved:  # what a second pass leaves alone is a copy of something, and counts nothing
                with torch.no_grad():
                    outputs()
                again = attributes_of(self.model)
                done.attributes = {n: x for n, x in moved.items() if unlike(again.get(n), x)}
        return done


@contextmanager
def _sketched_gradients(model: nn.Module, sketches: Sketches) -> Iterator[None]:
    """Within it a parameter's gradient is sketched and dropped as soon as it has come to be."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)

    def take(p: nn.Parameter) -> None:
        assert p.grad is not None
        for name in names[p]:
            new = sketch(name, p.grad.to_dense())
            if name in sketches:  # it comes in parts, as from a reentrant checkpoint
                new += sketches[name]
                new[0] = new[1:].square().mean().sqrt()
            sketches[name] = new
        p.grad = None

    trained = (p for p in names if p.requires_grad)
    handles = [p.register_post_accumulate_grad_hook(take) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def rounded_weights(model: nn.Module, step: float) -> Iterator[None]:
    """Move each weight at random, by up to half a step times itself, for a while."""
    random, before = torch.Generator().manual_seed(0), list[tuple[nn.Parameter, Tensor]]()
    for p in model.parameters():
        before.append((p, p.detach().clone()))
        moves = torch.rand(p.shape, generator=random).to(p.device) - 0.5
        p.data.mul_((1 + step * moves).to(p.dtype))
    try:
        yield
    finally:
        for p, weights in before:
            p.data.copy_(weights)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Set the parameters' gradients aside for a while."""
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


def attributes_of(model: nn.Module, name_of: Callable[[str], str] = str) -> dict[str, Any]:
    """Plain attributes of a model's modules that are numbers or tensors, by name in the network.

    `name_of` turns the path of a module in the model into its path in the network.
    """
    numbers: dict[str, Any] = {}
    for path, module in user_modules(model).items():
        for name, value in attributes(module).items():
            numbers |= dict(numbers_in(f"{name_of(path).strip('.')}.{name}".strip("."), value))
    return numbers


def unlike(x: Any, y: Any) -> bool:
    """Whether two attributes differ, as numbers or as tensors of one shape; rounding is none."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        same = x.shape == y.shape
        return same and not torch.allclose(x.double(), y.double().to(x.device), 1e-4, 1e-6)
    if isinstance(x, Tensor) or isinstance(y, Tensor) or x is None or y is None:
        return x is not y
    return bool(abs(x - y) > 1e-4 * abs(y))


def _state_of(function: Any, model: nn.Module) -> dict[tuple[int, str], Any]:
    """Buffers, attributes and enclosed values of a function, without those of the network."""
    state: dict[tuple[int, str], Any] = {}
    for i, part in enumerate(holders(function, {id(m) for m in model.modules()})):
        values = enclosed(part)
        if isinstance(part, nn.Module):
            values = attributes(part) | part._buffers
        for name, value in values.items():
            state |= {(i, key): x for key, x in numbers_in(name, value)}
    return state


def _check_state(
    what: str, before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]
) -> None:
    # what has come to be, such as an item of a list of losses, may be a record for its user
    if changed := [key[1] for key, x in after.items() if key in before and unlike(x, before[key])]:
        raise ValueError(
            f"{what} keeps state ({changed[0]!r} changes), which no checkpoint holds: make it part "
            "of the network, whose buffers and attributes are kept"
        )
