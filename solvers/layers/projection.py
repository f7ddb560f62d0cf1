"""Projections onto sets, as constraints on auxiliary variables and as layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from math import inf, isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybrid.solvers.kernels.fused import Interval


class Projection(nn.Module, ABC):
    r"""P(z) = argmin over c in C of ||c - z||^2, the prox of the indicator function of a set C.

    A solver that keeps z_k in C applies P to it (`project`). As the first unit of a block, a
    projection is part of the network: the composed network computes P(x_{k-1}). The block's
    sub-problem, whose input z_k lies in C already, skips P (`passed_by`), so nothing is
    differentiated through it. Back-propagation through P is straight-through (Bengio, Leonard and
    Courville, arXiv 1308.3432): the derivative is that of the identity where `passes` is true.
    """

    interval: Interval | None = None
    """C for the fused kernels; None: they do not know it, and torch projects."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_by = False

    @abstractmethod
    def project(self, z: Tensor) -> Tensor:
        """P(z), of the shape of z."""

    def passes(self, x: Tensor) -> Tensor | None:
        """Where a straight-through gradient passes; None: everywhere."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        if self.passed_by:
            return x
        return cast(Tensor, _StraightThrough.apply(x, self))  # type: ignore[no-untyped-call]


class Free(Projection):
    """No constraint: P(z) = z."""

    interval = "free", 0.0, 0.0, 0.0

    def project(self, z: Tensor) -> Tensor:
        return z


class NonNegative(Projection):
    """C = {z >= 0}."""

    interval = "box", 0.0, inf, 0.0

    def project(self, z: Tensor) -> Tensor:
        return z.clamp_min(0)


class Box(Projection):
    """C = {low <= z <= high}."""

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        super().__init__()
        if not (isfinite(low) and isfinite(high) and low < high):
            raise ValueError(f"box is {low:g}:{high:g}; its low end must lie below its high end")
        self.low, self.high = low, high
        self.interval = "box", low, high, 0.0

    def project(self, z: Tensor) -> Tensor:
        return z.clamp(self.low, self.high)

    def passes(self, x: Tensor) -> Tensor | None:
        return (x >= self.low) & (x <= self.high)


class Quantized(Box):
    """C = 2^bits evenly spaced values from low to high."""

    def __init__(self, bits: float = 2, low: float = 0.0, high: float = 1.0) -> None:
        super().__init__(low, high)
        if bits not in range(1, 17):
            raise ValueError(f"quantized to {bits:g} bits; choose a whole number from 1 to 16")
        self.spacing = (high - low) / (2 ** int(bits) - 1)
        self.interval = "quantized", low, high, self.spacing

    def project(self, z: Tensor) -> Tensor:
        whole = super().project(z).sub(self.low).div(self.spacing).round()
        return whole.mul(self.spacing).add(self.low)


class Sign(Projection):
    """C = {-1, 1} in every value; P(0) = 1."""

    interval = "sign", -1.0, 1.0, 2.0

    def project(self, z: Tensor) -> Tensor:
        return torch.where(z >= 0, 1.0, -1.0).to(z.dtype)

    def passes(self, x: Tensor) -> Tensor | None:
        return x.abs() <= 1


PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "none": Free,
    "non-negative": NonNegative,
    "box": Box,
    "quantized": Quantized,
    "sign": Sign,
}
"""The projections by name, for settings; others can be added."""


def projection(text: str) -> Projection:
    """The projection "name" or "name:number:number...", such as box:0:1, quantized:2 or sign.

    Raises ValueError for an unknown name, or for numbers that do not fit.
    """
    name, *numbers = text.split(":")
    if name not in PROJECTIONS:
        raise ValueError(f"constraint is {text!r}; choose one of {', '.join(PROJECTIONS)}")
    try:
        values = [float(number) for number in numbers]
        made = PROJECTIONS[name]
        signature(made).bind(*values)
    except (TypeError, ValueError):
        raise ValueError(
            f"constraint is {text!r}; write {name} with its numbers, as in box:0:1 or quantized:2"
        ) from None
    try:
        return made(*values)
    except ValueError as error:
        raise ValueError(f"constraint is {text!r}; {error}") from None


def leading_projection(block: nn.Module) -> Projection | None:
    """The projection that is a block's first layer, if there is one."""
    first = next(block.children(), None)
    return first if isinstance(first, Projection) else None


@contextmanager
def skipping(layer: Projection | None) -> Iterator[None]:
    """A context in which the layer returns its input, which satisfies the constraint already."""
    if layer is None:
        yield
        return
    layer.passed_by = True
    try:
        yield
    finally:
        layer.passed_by = False


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Projection) -> Tensor:
        passes = layer.passes(x)
        ctx.everywhere = passes is None
        if passes is not None:
            ctx.save_for_backward(passes)
        with torch.no_grad():
            out = layer.project(x)
        return out.clone() if out is x else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if ctx.everywhere:
            return gradient, None
        (passes,) = ctx.saved_tensors
        return gradient * passes, None
