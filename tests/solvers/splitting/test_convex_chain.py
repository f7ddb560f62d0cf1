"""Where block-ADMM and the augmented Lagrangian converge to on a convex chain, and how fast."""

from math import exp, log
from statistics import linear_regression
from typing import Any

import pytest
import torch
from linear_chain import linear_chain, residuals, spectral_radius
from problems import started

from hybrid.solvers import AugmentedLagrangian, BlockADMM

STEPS: dict[str, Any] = {"lam_step": 0.4, "local_lr": 1.0, "return_ratio": 1e9}
TWICE: dict[str, Any] = {"theta_steps": 2, "z_steps": 2, **STEPS}
CONVERGING: dict[str, Any] = {
    "jacobi": BlockADMM(rho=1.0, order="jacobi", **TWICE),
    "gauss-seidel": BlockADMM(rho=1.0, order="gauss-seidel", **TWICE),
    "augmented Lagrangian": AugmentedLagrangian(beta=0.5, lam_move="step", **STEPS),
    "augmented Lagrangian, limit": AugmentedLagrangian(beta=0.05, local_lr=0.3, return_ratio=1e9),
}


@pytest.mark.parametrize(
    ("K", "name"),
    [
        *((2, name) for name in CONVERGING),
        pytest.param(3, "gauss-seidel", marks=pytest.mark.slow),
    ],
)
def test_it_converges_to_the_ridge_regression_of_a_linear_chain(K, name):
    """In 200 K sweeps."""
    problem, objective = linear_chain(K)
    solver = CONVERGING[name]

    def program(block, links):
        mine = started(problem, solver, block, links)
        windows = [mine.train(problem.window(50)) for _ in range(4 * K)]
        return windows[-1].residual_norms() or (0.0, 0.0)

    assert all(max(norms) < 1e-6 for norms in problem.on_every_block(program))
    W = problem.blocks.model[0].weight
    (gradient,) = torch.autograd.grad(objective(W), W)
    assert float(gradient.norm()) < 1e-6


@pytest.mark.parametrize("order", ["jacobi", "gauss-seidel"])
@pytest.mark.parametrize(
    ("K", "more"),
    [(2, {}), (2, {"theta_steps": 2, "z_steps": 2}), (5, {})],
)
def test_its_residual_shrinks_at_the_rate_of_the_spectral_radius(K, order, more):
    """By visit, in the second half of as many visits as take it to about 1e-11: 474 at most."""
    solver = BlockADMM(rho=1.0, order=order, **(STEPS | more))
    problem, _ = linear_chain(K)
    radius = spectral_radius(problem, solver)
    visits = round(log(1e-11) / log(radius))
    measured = residuals(problem, solver, visits)[visits // 2 :]
    slope, _ = linear_regression(range(len(measured)), list(map(log, measured)))
    assert exp(slope) == pytest.approx(radius, abs=2e-4)
