"""The coupling term: its adjoint, its filter."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from solvers.kernels import couple, pool, pool_transpose, upsample

FACTOR = st.sampled_from([1, 2, 3])


def tensors(seed: int, factor: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    full = (2, 3, 2 * factor, 4 * factor)
    small = (2, 3, 2, 4)
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in (full, small, small)
    )


@given(st.integers(0, 10_000), FACTOR, st.floats(1e-3, 10))
def test_the_adjoint_is_the_derivative_of_the_loss(seed: int, factor: int, beta: float) -> None:
    x, lam, kappa = tensors(seed, factor)
    x.requires_grad_()
    y = torch.nn.functional.avg_pool2d(x, factor)
    loss = beta * ((lam - y) ** 2).sum() + (kappa * (lam - y)).sum()
    (expected,) = torch.autograd.grad(loss, x)
    found = couple(x.detach(), lam, kappa, beta, factor)
    torch.testing.assert_close(found.p_out, expected)
    torch.testing.assert_close(found.loss, loss.detach())


@given(st.integers(0, 10_000), FACTOR)
def test_squares_are_of_the_filtered_residual_and_output(seed: int, factor: int) -> None:
    x, lam, _ = tensors(seed, factor)
    y = pool(x, factor)
    expected = torch.stack([(lam - y).norm() ** 2, y.norm() ** 2])
    torch.testing.assert_close(couple(x, lam, None, 1.0, factor).squares, expected)


@given(st.integers(0, 10_000), FACTOR)
def test_pool_transpose_is_the_transpose_of_pool(seed: int, factor: int) -> None:
    x, y, _ = tensors(seed, factor)
    torch.testing.assert_close((pool(x, factor) * y).sum(), (x * pool_transpose(y, factor)).sum())


@given(st.integers(0, 10_000), FACTOR)
def test_pooling_undoes_upsampling(seed: int, factor: int) -> None:
    _, y, _ = tensors(seed, factor)
    torch.testing.assert_close(pool(upsample(y, factor), factor), y)


def test_no_multiplier_is_a_multiplier_of_zero() -> None:
    x, lam, _ = tensors(1, 2)
    without, with_zero = couple(x, lam, None, 0.5, 2), couple(x, lam, 0 * lam, 0.5, 2)
    assert torch.equal(without.p_out, with_zero.p_out)
    assert torch.equal(without.loss, with_zero.loss)
