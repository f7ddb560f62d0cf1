"""A convex chain of linear blocks, and what one visit of block-ADMM does on it, as a matrix."""

from __future__ import annotations

from typing import Any

import torch
from problems import Fixed, Problem, started
from torch import Tensor, nn

from hybrid.networks.partition.split import split
from hybrid.solvers import Batch
from hybrid.solvers.objective import Objective

RATE, DECAY = 0.3, 0.05


def linear_chain(K: int) -> tuple[Problem, Any]:
    """x -> A_{K-1} ... A_1 W x, W free: its problem, and the ridge regression's objective of W."""
    torch.manual_seed(K)
    parts = [nn.Linear(4, 3, bias=False).double()]
    parts += [nn.Linear(3, 3, bias=False).double().requires_grad_(False) for _ in range(K - 1)]
    for fixed in parts[1:]:
        fixed.weight.mul_(0.35).add_(torch.eye(3))
    blocks = split(nn.Sequential(*parts), cuts=[str(k) for k in range(1, K)])
    x, t, ids = *(torch.randn(24, n, dtype=torch.float64) for n in (4, 3)), torch.arange(24)

    def loss(out: Tensor, ids: Tensor) -> Tensor:
        return (out - t[ids]).square().sum(1).mean() / 2

    class Linear(Problem):
        def build(self, index: int, lr: float = 0.1, momentum: float = 0.9) -> Any:
            made = super().build(index, lr, momentum=0.0)
            made.optimizers["exact"].param_groups[0]["weight_decay"] = DECAY
            made.objective = Objective(loss, {})
            return made

    def objective(W: Tensor) -> Tensor:
        out = nn.Sequential(*parts[1:])(x @ W.T)
        return loss(out, ids) + DECAY / 2 * W.square().sum()

    return Linear(blocks, [Batch(ids, RATE, Fixed(x, ids))]), objective


def residuals(problem: Problem, solver: Any, visits: int) -> list[float]:
    """||Z - x|| over all cuts after each visit, as the solver reports it."""

    def program(block: Any, links: Any) -> list[float]:
        mine = started(problem, solver, block, links)
        norms = [mine.train(problem.window()).residual_norms() for _ in range(visits)]
        return [0.0 if each is None else each[0] ** 2 for each in norms]

    return [sum(cuts) ** 0.5 for cuts in zip(*problem.on_every_block(program), strict=True)]


def spectral_radius(problem: Problem, solver: Any) -> float:
    """Of the linear part M of one visit, s' = M s + m, of the state s = (W, Z_1, ..., U_1, ...).

    The formulas of `BlockADMM` with targets t = 0, on every unit vector of s at once.
    """
    first, *fixed = [
        layer.get_parameter("weight").detach() for layer in problem.blocks.model.children()
    ]
    A: dict[int, Tensor] = dict(enumerate(fixed, 1))
    x, rho, K = problem.batches[0].images(), solver.rho, len(A) + 1
    shapes = [tuple(first.shape), *[(len(x), len(first))] * (2 * (K - 1))]
    unit = torch.eye(sum(m * n for m, n in shapes), dtype=x.dtype)
    parts = unit.split([m * n for m, n in shapes], dim=1)
    W, *rest = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
    Z: dict[int, Tensor]
    U: dict[int, Tensor]
    Z, U = dict(enumerate(rest[: K - 1], 1)), dict(enumerate(rest[K - 1 :], 1))

    def trained() -> Tensor:
        new: Tensor = W
        for _ in range(solver.theta_steps):
            error = new @ x.T - (Z[1] + U[1]).mT
            new = new - RATE * solver.local_lr * (rho / len(x) * error @ x + DECAY * new)
        return new

    def output(k: int) -> Tensor:
        return (W @ x.T).mT if k == 0 else Z[k] @ A[k].T

    def stepped(k: int, below: Tensor) -> Tensor:
        z = Z[k]
        for _ in range(solver.z_steps):
            out = z @ A[k].T
            p_out = out if k == K - 1 else rho * (out - Z[k + 1] - U[k + 1])
            z = z - solver.lam_step / rho * (p_out @ A[k] + rho * (z - below + U[k]))
        return z

    if solver.order == "jacobi":
        below = {k: output(k - 1) for k in Z}
        W, Z = trained(), {k: stepped(k, below[k]) for k in Z}
        U = {k: U[k] + solver.kappa_step * (Z[k] - below[k]) for k in Z}
    else:
        W = trained()
        for k in Z:
            before = output(k - 1)
            Z[k] = stepped(k, before)
            U[k] = U[k] + solver.kappa_step * (Z[k] - before)
    M = torch.cat([value.flatten(1) for value in (W, *Z.values(), *U.values())], dim=1)
    return float(torch.linalg.eigvals(M).abs().max())
