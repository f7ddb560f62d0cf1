"""Units whose input can be computed from their output (Gomez et al., arXiv 1707.04585)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Reversible(nn.Module):
    r"""(x1, x2) -> (x2 + F(x1), x1), the two halves of the channels (Rivaud et al., 2406.02052).

    Its inverse is (y1, y2) -> (y2, y1 - F(y2)), exact but for rounding: `F` is evaluated on the
    same x1 both times, and what was added is subtracted.
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
        """x and its adjoint from y and its adjoint, by one forward and one backward pass of F.

        backward(x1, out, p_out) adds the gradients of F's parameters and gives that of x1.
        """
        (y1, y2), (p1, p2) = y.chunk(2, dim=1), p.chunk(2, dim=1)
        x1 = y2.detach().requires_grad_()
        with torch.enable_grad():
            out = self.residual(x1)
        p_x1 = p2 + backward(x1, out, p1)
        return torch.cat((x1.detach(), y1 - out.detach()), dim=1), torch.cat((p_x1, p1), dim=1)
