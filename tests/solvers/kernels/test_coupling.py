"""The coupling term: its adjoint, its filter."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.solvers.kernels.operations import couple

FACTOR = st.sampled_from([1, 2, 3])


def tensors(seed, factor):
    generator = torch.Generator().manual_seed(seed)
    full = (2, 3, 2 * factor, 4 * factor)
    small = (2, 3, 2, 4)
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in (full, small, small)
    )


@given(st.integers(0, 10_000), FACTOR, st.floats(1e-3, 10), st.booleans())
def test_the_adjoint_is_the_derivative_of_the_loss_and_squares_are_of_what_is_filtered(
    seed, factor, beta, multiplied
):
    x, lam, kappa = tensors(seed, factor)
    x.requires_grad_()
    y = torch.nn.functional.avg_pool2d(x, factor)
    loss = beta * ((lam - y) ** 2).sum() + multiplied * (kappa * (lam - y)).sum()
    (expected,) = torch.autograd.grad(loss, x)
    found = couple(x.detach(), lam, kappa if multiplied else None, beta, factor)
    torch.testing.assert_close(found.p_out, expected)
    torch.testing.assert_close(found.loss, loss.detach())
    squares = torch.stack([(lam - y).norm() ** 2, y.norm() ** 2])
    torch.testing.assert_close(found.squares, squares.detach())
