"""One mini-batch's sub-problem: forward, coupling, backward; static, and without communication."""

from __future__ import annotations

from torch import Tensor

from solvers.base import Block
from solvers.kernels import couple


def classify(
    block: Block, with_input: bool, lam: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The last block's: (x, p_in if asked for, mean loss), and gradients in the parameters."""
    lam = lam.detach().requires_grad_(with_input)
    x = block.forward(lam)
    loss = block.loss(x, labels)
    if loss.requires_grad:
        block.backward(loss)
    return x.detach(), block.sample_adjoint(lam), loss.detach()


def approach(
    block: Block,
    with_input: bool,
    beta: float,
    factor: int,
    lam: Tensor,
    target: Tensor,
    kappa: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The others': (x, p_in, mean coupling, its squares), and gradients in the parameters."""
    lam = lam.detach().requires_grad_(with_input)
    x = block.forward(lam)
    # scaled before it is rounded to x's format
    samples = len(lam) / block.loss_scale
    coupling = couple(x.detach(), target, kappa, beta, factor, samples)
    if x.requires_grad:
        x.backward(coupling.p_out)
    return x.detach(), block.sample_adjoint(lam), coupling.loss / len(lam), coupling.squares
