"""Projections onto sets, as constraints on auxiliary variables and as layers; factorizations."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite

import torch
from torch import Tensor, nn

from hybrid.solvers.kernels.operations import EPSILON, Interval, multiply


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


class Factorization(Projection):
    r"""P(z) = M S with codes M >= 0 that best fit z for a dictionary S >= 0 (rank x channels).

    Rows of z are its pixels (N H W x C of an (N, C, H, W) tensor) or samples ((N, C)). The updates
    are the multiplicative ones of Lee and Seung (NIPS 2000), with T = max(0, z):

        M <- M * (T S^T) / (M S S^T + eps)
        S <- S * (M^T T) / (M^T M S + eps),   M^T T and M^T M averaged over mini-batches

    The layer solves for M with S fixed, by `iterations` updates from a start that depends on z
    only. S changes only in block-ADMM, so it is a buffer, not a parameter.
    """

    dictionary: Tensor

    def __init__(self, channels: int, rank: int, iterations: int = 30) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"the rank of a factorization is {rank}; it must be at least 1")
        self.iterations = iterations
        self.register_buffer("dictionary", torch.rand(rank, channels) + 0.1)

    def project(self, z: Tensor) -> Tensor:
        return self.compose(self.codes(z))

    @torch.no_grad()
    def codes(self, z: Tensor, start: Tensor | None = None, iterations: int = 0) -> Tensor:
        """Compute M of z (N, C, H, W) or (N, C): (N, rank, H, W) or (N, rank).

        `start` is an initial M; with `iterations` 0 the layer's own number is used.
        """
        t, S = _rows(z).clamp_min(0), self.dictionary.to(z.dtype)
        right, gram = t @ S.T, S @ S.T
        if start is None:
            # the best multiple of one code for all factors
            scale = right.sum(1) / gram.sum().clamp_min(EPSILON)
            M = scale.clamp_min(EPSILON).unsqueeze(1).expand(-1, len(S)).contiguous()
        else:
            M = _rows(start)
        return _unflatten(multiply(right, gram, M, iterations or self.iterations), z)

    @torch.no_grad()
    def compose(self, codes: Tensor) -> Tensor:
        """Compute M S, of the shape of z."""
        return _unflatten(_rows(codes) @ self.dictionary.to(codes.dtype), codes)

    @torch.no_grad()
    def statistics(self, z: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (M^T T, M^T M) over the number of rows, in float64, for an update of S."""
        t, M = _rows(z).clamp_min(0).double(), _rows(codes).double()
        return M.T @ t / len(t), M.T @ M / len(t)

    @torch.no_grad()
    def update(self, cross: Tensor, gram: Tensor, iterations: int = 1) -> None:
        """Update S <- S * (M^T T) / (M^T M S + eps), from `statistics` or averages of them."""
        self.dictionary.copy_(multiply(cross.T, gram.T, self.dictionary.double().T, iterations).T)


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


def _rows(z: Tensor) -> Tensor:
    """Reshape (N, C, H, W) to (N H W, C); (N, C) stays."""
    return z.flatten(2).transpose(1, 2).flatten(0, 1) if z.dim() > 2 else z


def _unflatten(rows: Tensor, z: Tensor) -> Tensor:
    """Reshape (N H W, c) to (N, c, H, W) with N, H, W of z; (N, c) stays."""
    if z.dim() <= 2:
        return rows
    images = rows.view(len(z), -1, rows.shape[1]).transpose(1, 2)
    return images.reshape(len(z), rows.shape[1], *z.shape[2:])
