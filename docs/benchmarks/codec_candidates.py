"""Codecs and bottlenecks that codecs.py tries beside the package's: no figure has taken them in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from hybrid import split
from hybrid.networks.blocks import Blocks
from hybrid.solvers.codecs.base import Codec
from hybrid.solvers.codecs.formats import Int8
from hybrid.solvers.codecs.groups import Int3, Int4
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.registry import CODECS


class Int2(Int4):
    """2 bits."""

    name = "int2"
    bits = 2


class Feedback4(Int4):
    """e <- e + p;  send Q(e);  e <- e - Q(e), for micro-batches of one size."""

    name = "feedback-4"

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        kept = getattr(self, "kept", x)
        x = x + kept if kept is not x and kept.shape == x.shape else x
        message = super().encode(x, key)
        self.kept = x - self.decode(message, x.dtype, key)
        return message


class Feedback2(Feedback4, Int2):
    """The same in 2 bits."""

    name = "feedback-2"


class Int5(Int4):
    """5 bits."""

    name = "int5"
    bits = 5


class Nearest4(Int4):
    """int4 of adjoints, rounded to the nearest level."""

    name = "nearest-4"

    def _u(self, like: Tensor, key: Key) -> float:
        return 0.5


class Stochastic4(Int4):
    """int4 of adjoints with x' = l + s q: stochastic rounding."""

    name = "stochastic-4"

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        return Nearest4(self.group, self.adjoint).decode(message, dtype, key)


class Stochastic3(Int3):
    """The same in 3 bits."""

    name = "stochastic-3"

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        return Nearest3(self.group, self.adjoint).decode(message, dtype, key)


class Nearest3(Nearest4, Int3):
    """The other side of it."""


class Range2(Int2):
    """2 bits over [max(min, m - 1.5 sigma), min(max, m + 2 sigma)] of a group, to the nearest."""

    name = "range-2"

    def _range(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super()._range(groups)
        deviation, center = torch.std_mean(groups, 1, correction=0, keepdim=True)
        low = torch.maximum(low, center - 1.5 * deviation)
        return low, torch.minimum(high, center + 2 * deviation)

    def _u(self, like: Tensor, key: Key) -> float:
        like.clamp_(0, 3)
        return 0.5


class LowRank(Codec):
    """Z = X B, B <- orth(X^T (X B)) once in a message, warm (PowerSGD, arXiv 1905.13727).

    B goes with every message here, and the bytes do not count it.
    """

    name = "low-rank"
    tensors = 4

    def __init__(self, rank: int = 16, adjoint: bool = False) -> None:
        super().__init__(adjoint)
        self.rank, self.basis, self.narrow = rank, torch.empty(0), Int8()

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        rows = x.movedim(1, -1) if x.dim() > 3 else x
        X = rows.reshape(-1, rows.shape[-1])
        center = torch.zeros_like(X[:1]) if self.adjoint else X.mean(0, keepdim=True)
        X = X - center
        if not len(self.basis):
            generator = torch.Generator().manual_seed(0)
            self.basis = torch.randn(X.shape[1], self.rank, generator=generator)
        self.basis = torch.linalg.qr(X.T @ (X @ self.basis) + 1e-30 * self.basis).Q
        coefficients = (X @ self.basis).view(*rows.shape[:-1], -1)
        return (*self.narrow.encode(coefficients, key), self.basis, center)

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        *coefficients, basis, center = message
        x = self.narrow.decode(coefficients, dtype, key) @ basis.T + center
        return x.movedim(-1, 1) if x.dim() > 3 else x

    def sample_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
        channels = shape[0] if len(shape) > 2 else shape[-1]
        return self.rank * prod(shape) / channels


OWN = Int5, Int2, Feedback4, Feedback2, Nearest4, Stochastic4, Stochastic3, Range2, LowRank
CODECS.places = {**CODECS.places, **{each.name: f"{__name__}:{each.__name__}" for each in OWN}}


FEWER = "int4 / int4", "int3 / int3", "int2 / int2"


class Columns(nn.Linear):
    """A linear map over channels: of (N, T, C), and of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 4:
            return super().forward(x)
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Run(nn.Sequential):
    """Modules that are one unit."""


def with_bottlenecks(blocks: Blocks, share: int, sample: Tensor) -> Blocks:
    """D at the end of every block, U at the beginning of the next: principal components."""
    modules, x = OrderedDict[str, nn.Module](), sample
    for unit in blocks.units:
        run = [*unit.parts.values()]
        if unit.name in blocks.cuts:
            rows = (x.movedim(1, -1) if x.dim() > 3 else x).flatten(0, -2)
            center, rank = rows.mean(0), rows.shape[1] // share
            *_, V = torch.linalg.svd(rows - center, full_matrices=False)
            down, up = Columns(len(center), rank), Columns(rank, len(center))
            with torch.no_grad():
                for layer, weight, bias in (
                    (down, V[:rank], -V[:rank] @ center),
                    (up, V[:rank].T, center),
                ):
                    layer.weight.copy_(weight)
                    layer.bias.copy_(bias)
            modules[[*modules][-1]].append(down)
            run = [up, *run]
        modules[unit.name.replace(".", "-")] = Run(*run)
        with torch.no_grad():
            for module in unit.parts.values():
                x = module(x)
    cuts = [name.replace(".", "-") for name in blocks.cuts]
    return split(nn.Sequential(modules), cuts=cuts)
