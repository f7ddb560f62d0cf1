"""SOAP against its formula, and where it is Adam."""

import numpy as np
import pytest
import torch
from answers import refusal
from torch import nn

from hybrid.solvers.optimizers.soap import Soap


def steps(w, optimizer, count):
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        w.grad = torch.randn(w.shape, generator=random, dtype=w.dtype)
        optimizer.step()
    return w.detach()


def weight(*shape):
    return nn.Parameter(torch.linspace(-1, 1, int(np.prod(shape))).double().reshape(shape))


@pytest.mark.parametrize("max_dim", [100, 3])
def test_it_is_its_formula_in_float64(max_dim):
    # as many outputs as others: no first gradient leaves a side without a basis of its own
    lr, b1, b2, eps, wd, every = 0.1, 0.8, 0.9, 1e-3, 0.2, 3
    w = weight(6, 3, 2)
    optimizer = Soap([w], lr, (b1, b2), eps, wd, every, max_dim)
    x = w.detach().reshape(6, 6).numpy().copy()
    turns, m, s = max_dim >= 6, 0.0, 0.0
    random = torch.Generator().manual_seed(1)
    for t in range(8):
        g = torch.randn(w.shape, generator=random, dtype=w.dtype).reshape(6, 6).numpy()
        if t == 0:
            L, R = g @ g.T, g.T @ g
            P, Q = np.linalg.eigh(L)[1], np.linalg.eigh(R)[1]
            if turns:
                continue
        t = t if turns else t + 1
        L, R = b2 * L + (1 - b2) * g @ g.T, b2 * R + (1 - b2) * g.T @ g
        if t % every == 0:
            P, Q = np.linalg.qr(L @ P)[0], np.linalg.qr(R @ Q)[0]
        A, B = (P, Q) if turns else (np.eye(6), np.eye(6))
        m, s = b1 * m + (1 - b1) * g, b2 * s + (1 - b2) * (A.T @ g @ B) ** 2
        n = A.T @ m @ B / (1 - b1**t) / (np.sqrt(s / (1 - b2**t)) + eps)
        x = (1 - lr * wd) * x - lr * A @ n @ B.T
    found = steps(w, optimizer, 8).reshape(6, 6).numpy()
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-9)


def test_without_a_basis_it_is_torchs_adamw():
    mine, theirs = weight(3, 4), weight(3, 4)
    found = steps(mine, Soap([mine], 0.01, (0.9, 0.99), weight_decay=0.1, max_dim=1), 5)
    adamw = torch.optim.AdamW([theirs], 0.01, (0.9, 0.99), weight_decay=0.1)
    torch.testing.assert_close(found, steps(theirs, adamw, 5), rtol=0, atol=1e-12)


def test_a_rotation_of_the_problem_rotates_the_steps():
    """Which Adam's do not: what it is for."""
    random = torch.Generator().manual_seed(3)
    gradients = [torch.randn(4, 4, generator=random, dtype=torch.float64) for _ in range(6)]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=random, dtype=torch.float64))[0]
    plain, turned = (nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in range(2))
    for w, rotated in ((plain, gradients), (turned, [turn @ g for g in gradients])):
        optimizer = Soap([w], 0.1)
        for w.grad in rotated:
            optimizer.step()
    torch.testing.assert_close(turned.detach(), turn @ plain.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("first", [float("nan"), float("inf"), 1e30, 1e-30])
def test_a_first_gradient_out_of_all_range_ends_no_run_by_itself(first):
    w = nn.Parameter(torch.ones(3, 2))
    optimizer = Soap([w], 0.1)
    for scale in (first, 1.0, 1.0):
        w.grad = torch.full((3, 2), scale)
        optimizer.step()
    assert "frequency is 0; it must be at least 1" in refusal(Soap, [w], frequency=0)
    assert first not in (1e30, 1e-30) or w.isfinite().all()
