"""One mini-batch's sub-problem: forward, coupling, backward; static, and without communication."""

from torch import Tensor

from solvers.blocks.block import Block
from solvers.blocks.draws import Key
from solvers.kernels import couple


def classify(
    key: Key, block: Block, with_input: bool, size: int, lam: Tensor, labels: Tensor
) -> tuple[Tensor | None, ...]:
    """The last block's, and gradients.

    (its loss for x, p_in if asked for, mean loss, score, what a metric that accumulates is shown).
    """
    lam = lam.detach().requires_grad_() if with_input else lam.detach()
    x = block.forward(lam, key)
    found = block.classify(x, labels)
    block.backward(found.loss if size == len(lam) else found.loss * (len(lam) / size), key=key)
    loss = found.loss.detach()
    adjoint = block.sample_adjoint(lam, size)
    return loss, adjoint, loss, found.correct, *(found.seen or ())


def approach(
    key: Key,
    block: Block,
    with_input: bool,
    size: int,
    beta: float,
    factor: int,
    lam: Tensor,
    target: Tensor,
    kappa: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The others': (x, p_in, mean coupling, its squares), and gradients in the parameters."""
    lam = lam.detach().requires_grad_() if with_input else lam.detach()
    x = block.forward(lam, key)
    # scaled before it is rounded to x's format
    samples = size / block.loss_scale
    coupling = couple(x.detach(), target, kappa, beta, factor, samples)
    if x.requires_grad:
        with block.span("backward", key):
            x.backward(coupling.p_out)
    return x.detach(), block.sample_adjoint(lam, size), coupling.loss / len(lam), coupling.squares
