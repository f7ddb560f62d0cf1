"""Block-ADMM on a convex problem, and what it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from problems import Fixed, Problem, kept_window, make_problem, recorded, started
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

        module = self.blocks.module(index)
        trainable = [p for p in module.parameters() if p.requires_grad]
        parameters = trainable or [nn.Parameter(torch.zeros(0))]
        sgd = torch.optim.SGD(parameters, lr=lr, weight_decay=self.ridge.decay)
        optimisers = {"exact": sgd, "local": sgd}
        return Block(module, index, len(self.blocks), optimisers, loss=loss)


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
        windows = (mine.train(block, links, kept_window(problem, mine, 50)) for _ in range(2 * K))
        return [stats.residual_norms() or (0.0, 0.0) for stats in windows]

    norms = problem.on_every_block(program)
    W = problem.blocks.model[0].weight
    assert all(primal < 1e-6 and dual < 1e-6 for primal, dual in (rank[-1] for rank in norms))
    torch.testing.assert_close(W, ridge.solution(), rtol=1e-6, atol=1e-6)


@ORDERS
def test_a_single_sweep_of_the_online_setting_sends_nothing(order: str) -> None:
    problem = make_problem(seed=1, units=3, cuts=[1, 2], batch=4, batches=2)

    def program(block: Block, links: RankLinks) -> int:
        mine = recorded(problem, BlockADMM(order=order), block, links)
        sent = links.traffic.total_bytes
        mine.train(block, links, problem.window(mine))
        return links.traffic.total_bytes - sent

    assert problem.on_every_block(program) == [0, 0, 0]


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_an_optimiser_of_its_own_leaves_the_exact_one_alone(optimiser: str) -> None:
    problem = make_problem(seed=1, units=3, cuts=[2], batch=4)

    def program(block: Block, links: RankLinks) -> tuple[str, bool, bool]:
        mine = recorded(problem, BlockADMM(optimiser=optimiser), block, links)
        before = [p.detach().clone() for p in block.module.parameters()]
        mine.train(block, links, problem.window(mine))
        moved = not all(map(torch.equal, before, block.module.parameters()))
        return type(block.optimisers["local"]).__name__, not block.optimisers["exact"].state, moved

    name = {"sgd": "SGD", "adam": "AdamW"}[optimiser]
    assert problem.on_every_block(program) == [(name, True, True)] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rho", 0.0),
        ("rho", -1.0),
        ("theta_steps", 0),
        ("z_steps", 0),
        ("balance_ratio", 0.5),
        ("dual_limit", 1.0),
        ("momentum", 0.5),
        ("order", "seidel"),
        ("optimiser", "adagrad"),
        ("constraint", "positive"),
    ],
)
def test_impossible_settings_name_the_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {value!r}[^\n]*$"):
        BlockADMM(**{name: value})
