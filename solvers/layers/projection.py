"""Projections onto sets, as constraints on auxiliary variables and as layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite

import torch
from torch import Tensor, nn

from hybrid.solvers.kernels.operations import Interval


class Projection(nn.Module, ABC):
    r"""P(z) = argmin over c in C of ||c - z||^2, the prox of the indicator function of a set C.

    A solver that keeps z_k in C applies P to it (`project`). As the first unit of a block, a
    projection is part of the network: the composed network computes P(x_{k-1}). The input z_k of
    the block's sub-problem is in C already, so the sub-problem skips P (`skipped`), and there is no
    gradient through P. Back-propagation through P is straight-through (Bengio, Leonard and
    Courville, arXiv 1308.3432): the derivative is that of the identity where `passes` is true.
    """

    interval: Interval | None = None
    """C for the fused kernels; None: torch projects."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = False

    @abstractmethod
    def project(self, z: Tensor) -> Tensor:
        """Compute P(z), of the shape of z."""

    def passes(self, x: Tensor) -> Tensor | None:
        """Return where a straight-through gradient passes; None: everywhere."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        if self.skipped:
            return x
        change, passes = x - x.detach(), self.passes(x.detach())  # 0, with a gradient
        return self.project(x.detach()) + (change if passes is None else change * passes)


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
    """Make the projection "name" or "name:number:number...", such as box:0:1, quantized:2 or sign.

    Raises ValueError for an unknown name or invalid numbers.
    """
    name, *numbers = text.split(":")
    if name not in PROJECTIONS:
        raise ValueError(f"constraint is {text!r}; choose one of {', '.join(PROJECTIONS)}")
    try:
        return PROJECTIONS[name](*map(float, numbers))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"constraint is {text!r} ({error}); write {name} with its numbers, as in box:0:1 or "
            "quantized:2"
        ) from None


def leading_projection(block: nn.Module) -> Projection | None:
    """Return the projection that is a block's first layer, if there is one."""
    first = next(block.children(), None)
    return first if isinstance(first, Projection) else None


@contextmanager
def skipping(layer: Projection | None) -> Iterator[None]:
    """Make the layer return its input, which satisfies the constraint already, within the body."""
    if layer is None:
        yield
        return
    layer.skipped = True
    try:
        yield
    finally:
        layer.skipped = False
