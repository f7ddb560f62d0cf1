"""Residual units that can be skipped or inverted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor, nn

_here = local()


class Skippable(nn.Module):
    r"""x -> x + b F(x) / p in training, b = 1 with probability p, else 0; x -> x + F(x) in tests.

    This is stochastic depth (Huang et al., arXiv 1603.09382).

    F(x) is divided by p in training, so the tested and exported network is the plain one (Huang et
    al. multiply by p in tests instead). One b is drawn for all samples of a pass. If it is 0, the
    unit costs nothing and its running statistics do not change. The `forward` of a subclass begins
    with `if self.left_out(): return x`, and adds `self.scaled(F(x))` to x.
    """

    survival: float = 1.0
    """p."""

    @property
    def skippable(self) -> bool:
        """Whether the unit maps x to x when it is left out."""
        return True

    def left_out(self) -> bool:
        """Draw b; return whether it is 0."""
        if not self.training or self.survival == 1.0 or getattr(_here, "decided", False):
            return False
        return bool(torch.rand(()) >= self.survival)

    def scaled(self, branch: Tensor) -> Tensor:
        """Divide F(x) by p in training."""
        return branch / self.survival if self.training and self.survival < 1.0 else branch


def survival(module: nn.Module | None) -> float:
    """Return p of a module; 1 if it is never left out."""
    return module.survival if isinstance(module, Skippable) else 1.0


@contextmanager
def nothing_left_out() -> Iterator[None]:
    """Run all units on this thread within the body: the caller decides which are left out."""
    before = getattr(_here, "decided", False)
    _here.decided = True
    try:
        yield
    finally:
        _here.decided = before


class Reversible(nn.Module):
    r"""(x1, x2) -> (x2 + F(x1), x1), the two halves of the channels (Rivaud et al., 2406.02052).

    Its inverse (Gomez et al., arXiv 1707.04585) is (y1, y2) -> (y2, y1 - F(y2)). It is exact up to
    rounding: F(x1) is computed from the same x1 both times, first added, then subtracted.
    """

    def __init__(self, residual: nn.Module) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """(N, 2 C, H, W) -> (N, 2 C, H, W)."""
        x1, x2 = x.chunk(2, dim=1)
        return torch.cat((x2 + self.residual(x1), x1), dim=1)

    def reverse(
        self, y: Tensor, p: Tensor, backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute x and its adjoint from y and its adjoint, by one pass of F each way.

        backward(x1, out, p_out) adds the gradients of F's parameters and returns that of x1.
        """
        (y1, y2), (p1, p2) = y.chunk(2, dim=1), p.chunk(2, dim=1)
        x1 = y2.detach().requires_grad_()
        with torch.enable_grad():
            out = self.residual(x1)
        p_x1 = p2 + backward(x1, out, p1)
        return torch.cat((x1.detach(), y1 - out.detach()), dim=1), torch.cat((p_x1, p1), dim=1)
