"""Where block-ADMM and the augmented Lagrangian converge to on a convex chain, in float64."""

from typing import Any

import pytest
import torch
from problems import Fixed, Problem, started
from torch import nn

from hybrid.networks.partition.split import split
from hybrid.solvers import AugmentedLagrangian, Batch, BlockADMM
from hybrid.solvers.objective import Objective


def linear_chain(K):
    """x -> A_{K-1} ... A_1 W x, W free: its problem, and the ridge regression's objective of W."""
    torch.manual_seed(K)
    parts = [nn.Linear(4, 3, bias=False).double()]
    parts += [nn.Linear(3, 3, bias=False).double().requires_grad_(False) for _ in range(K - 1)]
    for fixed in parts[1:]:
        fixed.weight.mul_(0.35).add_(torch.eye(3))
    blocks = split(nn.Sequential(*parts), cuts=[str(k) for k in range(1, K)])
    x, t, ids = *(torch.randn(24, n, dtype=torch.float64) for n in (4, 3)), torch.arange(24)

    def loss(out, ids):
        return (out - t[ids]).square().sum(1).mean() / 2

    class Linear(Problem):
        def build(self, index, lr=0.1, momentum=0.9):
            made = super().build(index, lr, momentum=0.0)
            made.optimizers["exact"].param_groups[0]["weight_decay"] = 0.05
            made.objective = Objective(loss, {})
            return made

    def objective(W):
        out = nn.Sequential(*parts[1:])(x @ W.T)
        return loss(out, ids) + 0.05 / 2 * W.square().sum()

    return Linear(blocks, [Batch(ids, 0.3, Fixed(x, ids))]), objective


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
