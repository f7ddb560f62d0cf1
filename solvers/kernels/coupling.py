"""The coupling of a block's output to the auxiliary variable of its cut, in torch on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Coupling(NamedTuple):
    """Value and terminal adjoint of the coupling term of one mini-batch."""

    loss: Tensor
    """Sum over samples of beta ||S lam - S x||^2 + <kappa, S lam - S x>."""
    p_out: Tensor
    """Its derivative by x, per sample, shaped like x."""
    squares: Tensor
    """(||S lam - S x||^2, ||S x||^2) over the mini-batch."""


def couple(x: Tensor, lam: Tensor, kappa: Tensor | None, beta: float, factor: int = 1) -> Coupling:
    """Couple output x (N, C, H, W) to lam and kappa, which are already downsampled by `factor`.

    p_out = S^T (-2 beta (lam - S x) - kappa); a kappa of None stands for zero.
    """
    y = pool(x, factor)
    r = lam - y
    square = _dot(r, r)
    loss = beta * square
    if kappa is None:
        p = r.mul(-2 * beta)
    else:
        loss = loss + _dot(kappa, r)
        p = torch.add(kappa, r, alpha=2 * beta).neg_()
    return Coupling(loss, pool_transpose(p, factor), torch.stack((square, _dot(y, y))))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> in one pass over memory where both lie in the same order."""
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    return torch.dot(a.reshape(-1), b.reshape(-1))


def pool(x: Tensor, factor: int) -> Tensor:
    """S x: the mean over factor x factor squares of pixels."""
    return x if factor == 1 else F.avg_pool2d(x, factor)


def pool_transpose(y: Tensor, factor: int) -> Tensor:
    """S^T y: each value spread evenly over its square."""
    return y if factor == 1 else upsample(y, factor) / factor**2


def upsample(y: Tensor, factor: int) -> Tensor:
    """S^+ y = factor^2 S^T y: each value repeated over its square."""
    return y if factor == 1 else F.interpolate(y, scale_factor=factor, mode="nearest")
