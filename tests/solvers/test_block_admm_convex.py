"""Block-ADMM on a convex problem: where it converges to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from problems import Fixed, Problem, started
from torch import Tensor, nn

from hybrid.cuts.partition import split
from hybrid.links import RankLinks
from solvers import Batch, Block, BlockADMM

ORDERS = pytest.mark.parametrize("order", ["jacobi", "gauss-seidel"])


@dataclass
class Ridge:
    """min over W of 1/(2N) sum ||A W x - t||^2 + decay/2 ||W||^2, A = A_{K-1} ... A_1 given."""

    K: int
    decay: float = 0.05

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.K)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.x, self.t = drawn(24, 4), drawn(24, 3)
        eye = torch.eye(3, dtype=torch.float64)
        self.A = [eye + 0.2 * drawn(3, 3) for _ in range(self.K - 1)]

    def solution(self) -> Tensor:
        """A^T A W X^T X / N + decay W = A^T T^T X / N, by the Kronecker product."""
        A = torch.linalg.multi_dot([*reversed(self.A), torch.eye(3, dtype=torch.float64)])
        N = len(self.x)
        gram = self.x.T @ self.x / N
        left = torch.kron(A.T @ A, gram) + self.decay * torch.eye(12, dtype=torch.float64)
        return torch.linalg.solve(left, (A.T @ self.t.T @ self.x / N).flatten()).view(3, 4)

    def problem(self) -> LinearProblem:
        torch.manual_seed(0)
        chain = [nn.Linear(4, 3, bias=False, dtype=torch.float64)]
        for A in self.A:
            fixed = nn.Linear(3, 3, bias=False, dtype=torch.float64)
            fixed.weight = nn.Parameter(A.clone(), requires_grad=False)
            chain.append(fixed)
        blocks = split(nn.Sequential(*chain), cuts=[str(k) for k in range(1, self.K)])
        ids = torch.arange(len(self.x))
        made = LinearProblem(blocks, [Batch(ids, 0.3, Fixed(self.x, ids))])
        made.ridge = self
        return made


class LinearProblem(Problem):
    """The chain of `Ridge`; labels are sample numbers."""

    ridge: Ridge

    def build(self, index: int, lr: float = 0.1, momentum: float = 0.9) -> Block:
        def loss(x: Tensor, ids: Tensor) -> Tensor:
            return (x - self.ridge.t[ids]).square().sum(1).mean() / 2

        made = super().build(index, lr, momentum=0.0)
        made.optimisers["exact"].param_groups[0]["weight_decay"] = self.ridge.decay
        made.loss = loss
        return made


@ORDERS
@pytest.mark.parametrize("K", [2, 3])
def test_it_converges_to_the_ridge_regression_of_a_linear_chain(order: str, K: int) -> None:
    ridge = Ridge(K)
    problem = ridge.problem()
    solver = BlockADMM(
        rho=1.0,
        order=order,
        theta_steps=2,
        z_steps=2,
        lam_step=0.4,
        local_lr=1.0,
        return_ratio=1e9,
    )

    def program(block: Block, links: RankLinks) -> list[tuple[float, float]]:
        mine = started(problem, solver, block, links)
        windows = (mine.train(problem.window(50)) for _ in range(2 * K))
        return [stats.residual_norms() or (0.0, 0.0) for stats in windows]

    norms = problem.on_every_block(program)
    W = problem.blocks.model[0].weight
    assert all(primal < 1e-6 and dual < 1e-6 for primal, dual in (rank[-1] for rank in norms))
    torch.testing.assert_close(W, ridge.solution(), rtol=1e-6, atol=1e-6)
