"""One mini-batch's sub-problem: forward, coupling, backward, all without communication."""

from torch import Tensor

from hybrid.solvers.blocks.block import Block
from hybrid.solvers.blocks.draws import Key
from hybrid.solvers.kernels.operations import Coupling, couple
from hybrid.solvers.uncompiled import paired


def classification_step(
    key: Key,
    block: Block,
    with_input: bool,
    size: int,
    lam: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The last block's: leaves gradients in the parameters.

    Gives (loss in place of x, p_in if `with_input`, mean loss, score, what an accumulating metric
    needs). Tensors only, so that it can be a CUDA graph.
    """
    lam = lam.detach().requires_grad_() if with_input else lam.detach()
    x = block.forward(lam, key)
    found = block.classify(x, labels, weight)
    block.backward(found.loss if size == len(lam) else found.loss * (len(lam) / size), key=key)
    loss = found.loss.detach()
    adjoint = block.sample_adjoint(lam, size)
    return loss, adjoint, loss, found.correct, *(found.seen or ())


def coupling_step(
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
    """Any other block's: (x, p_in, mean coupling, its squares), and gradients in the parameters."""
    lam = lam.detach().requires_grad_() if with_input else lam.detach()
    x = block.forward(lam, key)
    coupling = couple_backward(key, block, x, target, kappa, beta, factor, size)
    return x.detach(), block.sample_adjoint(lam, size), coupling.loss / len(lam), coupling.squares


def couple_backward(
    key: Key,
    block: Block,
    x: Tensor,
    target: Tensor,
    kappa: Tensor | None,
    beta: float,
    factor: int,
    size: int,
) -> Coupling:
    """Couple x to its target, and go backward from the coupling's mean over `size` samples."""
    # scaled before it is rounded to x's format
    samples = size / block.loss_scale
    coupling = couple(x.detach(), target, kappa, beta, factor, samples)
    if x.requires_grad:
        with block.span("backward", key):
            paired(x, coupling.p_out).backward()
    return coupling
