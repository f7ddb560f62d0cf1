"""The element-wise work of sub-problems and messages: in torch, and by the fused kernels."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid.solvers.kernels import fused
from hybrid.solvers.kernels.choice import launcher
from hybrid.solvers.kernels.fused import Interval

EPSILON = 1e-8
"""Keeps the quotients of `multiply` finite."""


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


def multiply(right: Tensor, gram: Tensor, start: Tensor, iterations: int) -> Tensor:
    """`iterations` times M <- M * right / (M gram + eps), from M = `start` (rows, rank).

    With T ~ M S, right = T S^T and gram = S S^T step M; M^T T and M^T M, transposed, step S^T.
    """
    launch, narrow = launcher(right, gram, start), start.shape[1] <= fused.MAXIMUM_RANK
    if launch is not None and start.dtype == right.dtype == gram.dtype == torch.float32 and narrow:
        return fused.multiply(launch, right, gram, start, iterations, EPSILON)
    M = start
    for _ in range(iterations):
        M = M * (right / (M @ gram + EPSILON))
    return M


def pack(x: Tensor, dtype: torch.dtype, factor: int = 1) -> tuple[Tensor, Tensor | None]:
    """S x as `dtype`; for int8, round(S x / s) and s = max |S x| / 127.

    s is that of each sample and channel, (N, C, 1, 1), or without pixels of each sample, (N, 1).
    """
    launch = launcher(x)
    # settings are checked so that the squares cover the image; if they do not, torch cuts it off
    if launch is not None and x.dim() == 4 and not any(side % factor for side in x.shape[2:]):
        if dtype is torch.int8 or (factor > 1 and dtype in fused.NAMES):
            return fused.pack(launch, x, dtype, factor)
        if factor == 1:
            return x.to(dtype), None
    y = pool(wide(x), factor)
    if dtype is not torch.int8:
        return y.to(dtype), None
    pixels = tuple(range(min(2, y.dim() - 1), y.dim()))
    scale = (y.abs().amax(pixels, keepdim=True) / 127).to(x.dtype)
    divisor = wide(scale).clamp_min(torch.finfo(y.dtype).tiny)
    return (y / divisor).round().clamp(-127, 127).to(torch.int8), scale


def unpack(packed: Tensor, scale: Tensor | None, dtype: torch.dtype, factor: int = 1) -> Tensor:
    """S^+ y as `dtype`, where y is the result of `pack`."""
    launch = launcher(scale) if packed.dtype is torch.int8 else launcher(packed)
    useful = factor > 1 or packed.dtype is torch.int8
    if launch is not None and packed.dim() == 4 and useful and dtype in fused.NAMES:
        return fused.unpack(launch, packed, scale, dtype, factor)
    x = packed.to(dtype)
    return upsample(x if scale is None else x * scale.to(dtype), factor)


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
