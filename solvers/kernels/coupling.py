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
    square = r.square().sum()
    p = r.mul(-2 * beta)
    loss = beta * square
    if kappa is not None:
        p -= kappa
        loss = loss + (kappa * r).sum()
    return Coupling(loss, pool_transpose(p, factor), torch.stack((square, y.square().sum())))


def pool(x: Tensor, factor: int) -> Tensor:
    """S x: the mean over factor x factor squares of pixels."""
    return x if factor == 1 else F.avg_pool2d(x, factor)


def pool_transpose(y: Tensor, factor: int) -> Tensor:
    """S^T y: each value spread evenly over its square."""
    return y if factor == 1 else upsample(y, factor) / factor**2


def upsample(y: Tensor, factor: int) -> Tensor:
    """S^+ y = factor^2 S^T y: each value repeated over its square."""
    return y if factor == 1 else F.interpolate(y, scale_factor=factor, mode="nearest")
