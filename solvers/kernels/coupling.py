"""The coupling of a block's output to the auxiliary variable of its cut."""

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.solvers.kernels import fused
from hybrid.solvers.kernels.choice import launcher
from hybrid.solvers.kernels.filters import pool, pool_transpose


class Coupling(NamedTuple):
    """Value and adjoint of the coupling term of one mini-batch."""

    loss: Tensor
    """Sum over samples of beta ||S lam - S x||^2 + <kappa, S lam - S x>."""
    p_out: Tensor
    """Its derivative by x over `samples`, with the shape and number format of x."""
    squares: Tensor
    """(||S lam - S x||^2, ||S x||^2) over the mini-batch."""


def couple(
    x: Tensor, lam: Tensor, kappa: Tensor | None, beta: float, factor: int = 1, samples: float = 1.0
) -> Coupling:
    """Couple output x (N, C, H, W) to lam and kappa, which are already downsampled by `factor`.

    p_out = S^T (-2 beta (lam - S x) - kappa) / samples; a kappa of None stands for zero. lam and
    kappa may have 16 bits; computed is in float32, or in float64 if an argument is.
    """
    if (launch := launcher(x, lam, kappa)) is not None:
        p_out, sums = fused.couple(launch, x, lam, kappa, beta, factor, samples)
        return Coupling(sums[0], p_out, sums[1:])
    y = pool(wide(x), factor)
    r = wide(lam) - y
    square = dot(r, r)
    loss = beta * square
    if kappa is None:
        p = r.mul(-2 * beta)
    else:
        kappa = wide(kappa)
        loss = loss + dot(kappa, r)
        p = torch.add(kappa, r, alpha=2 * beta).neg_()
    if samples != 1:
        p = p / samples
    squares = torch.stack((square, dot(y, y)))
    return Coupling(loss, pool_transpose(p, factor).to(x.dtype), squares)


def wide(x: Tensor) -> Tensor:
    """x in float32 if it has 16 bits: the format that is computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, in one pass over memory if both have the same layout."""
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    return torch.dot(a.reshape(-1), b.reshape(-1))
