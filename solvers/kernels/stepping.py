"""The step of an auxiliary variable and of its multiplier."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid.solvers.kernels import fused
from hybrid.solvers.kernels.choice import launcher
from hybrid.solvers.kernels.coupling import dot, wide
from hybrid.solvers.kernels.filters import pool, pool_transpose, upsample
from hybrid.solvers.kernels.fused import Interval


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
    flat: bool = False,
    constraint: Constraint | None = None,
) -> Stepped:
    """Step lam (N, C, H, W) and kappa towards x; x and kappa are downsampled by `factor`.

        lam'   = P(lam - eta (p_in + S^T (2 beta (S lam - x) + kappa)))
        kappa' = kappa + ascent (S lam' - x),    S lam' of lam' in the number format of lam

    With `flat`, P is applied to S^+ S of its argument: lam' is constant over each square.
    """
    launch = launcher(lam, x, kappa, p_in)
    interval = ("free", 0.0, 0.0, 0.0) if constraint is None else constraint.interval
    if launch is not None and interval is not None:
        return Stepped(
            *fused.step(launch, lam, x, kappa, p_in, beta, eta, ascent, factor, flat, interval)
        )
    moved = descend(lam, x, kappa, p_in, beta, eta, factor)
    if flat:
        moved = upsample(pool(moved, factor), factor)
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
    flat: bool = False,
) -> Stepped:
    """The limit of `step` for a large beta: S lam' = x, and kappa goes to -factor^2 S p_in.

    lam'   = lam + S^+ (x - S lam),     flat: S^+ x
    kappa' = (1 - rate) kappa - rate factor^2 S p_in
    """
    wanted = wide(x)
    new = upsample(wanted if flat else wanted - pool(wide(lam), factor), factor)
    new = new if flat else wide(lam) + new
    if factor == 1:
        new = wanted  # without a rounding error
    goal = -(factor**2) * pool(wide(p_in), factor)
    moved = ((1 - rate) * wide(kappa) + rate * goal).to(kappa.dtype)
    change = 2 * beta * (new - wide(lam))
    squares = torch.stack((torch.zeros_like(dot(goal, goal)), dot(change, change)))
    return Stepped(new.to(lam.dtype), x.to(lam.dtype), moved, squares)


def ascend(kappa: Tensor, lam: Tensor, x: Tensor, ascent: float) -> Tensor:
    """kappa + ascent (lam - x), all of one shape, in kappa's number format."""
    if (launch := launcher(kappa, lam, x)) is not None:
        return fused.ascend(launch, kappa, lam, x, ascent)
    return (wide(kappa) + ascent * (wide(lam) - wide(x))).to(kappa.dtype)
