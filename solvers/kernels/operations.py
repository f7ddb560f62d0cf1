"""The element-wise work of sub-problems and messages: in torch, and by the fused kernels."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid.solvers.kernels.launcher import elementwise, launcher

SETS = ("free", "box", "quantized", "sign")

Interval = tuple[str, float, float, float]
"""A set to project onto: its name in SETS, low end, high end and spacing."""


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
    y = x if factor == 1 else pool(wide(x), factor)
    if (launch := launcher(y, lam, kappa)) is not None:
        inputs = y, lam, None if kappa is None else kappa.to(lam.dtype)
        numbers = beta, samples
        (p,), sums = elementwise(launch, "couple", inputs, numbers, (y, lam), outputs=[0], sums=3)
        loss, squares = sums[0], sums[1:]
    else:
        y = wide(y)
        r = wide(lam) - y
        square = dot(r, r)
        loss, p = beta * square, r.mul(-2 * beta)
        if kappa is not None:
            kappa = wide(kappa)
            loss = loss + dot(kappa, r)
            p = torch.add(kappa, r, alpha=2 * beta).neg_()
        p = p if samples == 1 else p / samples
        squares = torch.stack((square, dot(y, y)))
    return Coupling(loss, pool_transpose(p, factor).to(x.dtype), squares)


class Constraint(Protocol):
    """A set C in which an auxiliary variable must lie."""

    interval: Interval | None
    """C for the fused kernels; None: only torch can project onto it."""

    def project(self, z: Tensor) -> Tensor:
        """P(z)."""


class Stepped(NamedTuple):
    """The result of a step, in the number formats of its arguments."""

    lam: Tensor
    shared: Tensor
    """S lam."""
    kappa: Tensor | None
    squares: Tensor
    """(||S lam' - x||^2, ||2 beta (lam' - lam)||^2) over the mini-batch."""


def step(
    lam: Tensor,
    x: Tensor,
    kappa: Tensor | None,
    p_in: Tensor,
    beta: float,
    eta: float,
    ascent: float = 0.0,
    factor: int = 1,
    constraint: Constraint | None = None,
) -> Stepped:
    """Step lam (N, C, H, W) and kappa towards x; x and kappa are downsampled by `factor`.

    lam'   = P(lam - eta (p_in + S^T (2 beta (S lam - x) + kappa)))
    kappa' = kappa + ascent (S lam' - x),    S lam' of lam' in the number format of lam
    """
    launch = launcher(lam, x, kappa, p_in) if factor == 1 else None
    interval = ("free", 0.0, 0.0, 0.0) if constraint is None else constraint.interval
    if launch is not None and interval is not None:
        name, *ends = interval
        inputs = lam, x, None if kappa is None else kappa.to(lam.dtype), p_in.float()
        numbers: list[float | np.int32] = [beta, eta, ascent, np.int32(SETS.index(name)), *ends]
        (new, new_kappa), squares = elementwise(
            launch, "step", inputs, numbers, (x, lam), outputs=[0, 2], sums=2
        )
        return Stepped(new, new, new_kappa, squares)
    moved = descend(lam, x, kappa, p_in, beta, eta, factor)
    if constraint is not None:
        moved = constraint.project(moved)
    return complete_step(moved, lam, x, kappa, beta, ascent, factor)


def descend(
    lam: Tensor,
    x: Tensor,
    kappa: Tensor | None,
    p_in: Tensor,
    beta: float,
    eta: float,
    factor: int = 1,
) -> Tensor:
    """lam - eta (p_in + S^T (2 beta (S lam - x) + kappa)), in at least float32."""
    lam = wide(lam)
    pull = beta * 2 * (pool(lam, factor) - wide(x))
    if kappa is not None:
        pull = pull + wide(kappa)
    return lam - eta * (p_in + pool_transpose(pull, factor))


def complete_step(
    new: Tensor,
    lam: Tensor,
    x: Tensor,
    kappa: Tensor | None,
    beta: float,
    ascent: float,
    factor: int = 1,
) -> Stepped:
    """The result of `step` if lam' is `new`."""
    change = 2 * beta * (new - wide(lam))
    new = new.to(lam.dtype)
    shared = pool(wide(new), factor).to(lam.dtype)
    r = wide(shared) - wide(x)
    if kappa is not None:
        kappa = (wide(kappa) + ascent * r).to(kappa.dtype)
    return Stepped(new, shared, kappa, torch.stack((dot(r, r), dot(change, change))))


def step_limit(
    lam: Tensor,
    x: Tensor,
    kappa: Tensor,
    p_in: Tensor,
    beta: float,
    rate: float,
    factor: int = 1,
) -> Stepped:
    """The limit of `step` for a large beta: S lam' = x, and kappa goes to -factor^2 S p_in.

    lam'   = lam + S^+ (x - S lam)
    kappa' = (1 - rate) kappa - rate factor^2 S p_in
    """
    if factor == 1 and (launch := launcher(lam, x, kappa, p_in)) is not None:
        inputs = lam, x, kappa.to(lam.dtype), p_in.float()
        (new, moved), squares = elementwise(
            launch, "limit", inputs, [beta, rate], (x, lam), outputs=[0, 2], sums=2
        )
        return Stepped(new, new, moved, squares)
    wanted = wide(x)
    new = wanted  # without a rounding error
    if factor > 1:
        new = wide(lam) + upsample(wanted - pool(wide(lam), factor), factor)
    goal = -(factor**2) * pool(wide(p_in), factor)
    moved = ((1 - rate) * wide(kappa) + rate * goal).to(kappa.dtype)
    change = 2 * beta * (new - wide(lam))
    squares = torch.stack((torch.zeros_like(dot(goal, goal)), dot(change, change)))
    return Stepped(new.to(lam.dtype), x.to(lam.dtype), moved, squares)


def ascend(kappa: Tensor, lam: Tensor, x: Tensor, ascent: float) -> Tensor:
    """kappa + ascent (lam - x), all of one shape, in kappa's number format."""
    return (wide(kappa) + ascent * (wide(lam) - wide(x))).to(kappa.dtype)


def pool(x: Tensor, factor: int) -> Tensor:
    """S x: the mean over factor x factor squares of pixels."""
    return x if factor == 1 else F.avg_pool2d(x, factor)


def pool_transpose(y: Tensor, factor: int) -> Tensor:
    """S^T y: each value spread evenly over its square."""
    return y if factor == 1 else upsample(y, factor) / factor**2


def upsample(y: Tensor, factor: int) -> Tensor:
    """S^+ y = factor^2 S^T y: each value repeated over its square."""
    return y if factor == 1 else F.interpolate(y, scale_factor=factor, mode="nearest")


def wide(x: Tensor) -> Tensor:
    """x in float32 if it has 16 bits: the format that is computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, in one pass over memory if both have the same layout."""
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    return torch.dot(a.reshape(-1), b.reshape(-1))
