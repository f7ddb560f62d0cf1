"""Block-ADMM: what it computes, where it converges to, and what Z is held to."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from problems import (
    ABOVE,
    BELOW,
    Fixed,
    Problem,
    buffers,
    make_problem,
    problems,
    recorded,
    started,
)
from torch import Tensor, nn

from hybrid.networks.partition.split import split
from hybrid.solvers import AugmentedLagrangian, Batch, BlockADMM
from hybrid.solvers.kernels.operations import step
from hybrid.solvers.layers.projection import PROJECTIONS, Projection, Sign
from tests.solvers.splitting.scaled_admm import ScaledADMM

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
# small steps: where the weights are unstable, rounding errors grow a thousandfold a sweep
CLASSIC = {"local_lr": 0.05, "lam_step": 0.3}
LONG = CLASSIC | {"lam_step": 1.5}
ORDERS = pytest.mark.parametrize("order", ["jacobi", "gauss-seidel"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Snapshot:
    """One rank after one window."""

    buffers: dict[str, Tensor]
    weights: list[Tensor]
    norms: tuple[float, float] | None
    notices: list[str]


def trained(problem, solver, windows=3, start=lambda *rank: recorded(*rank, carried=True)):
    """[window][rank] over windows of one sweep each, their Z and U kept."""

    def program(block, links):
        mine = start(problem, solver, block, links)
        found = []
        for _ in range(windows):
            stats = mine.train(problem.window())
            weights = [p.detach().clone() for p in block.module.parameters()]
            held = buffers(block, mine, problem.samples)
            found.append(Snapshot(held, weights, stats.residual_norms(), stats.notices))
        return found

    return list(zip(*problem.on_every_block(program), strict=True))


def scaled(problem, solver, **more):
    """The same problem and settings for the formulas, with weights of their own."""
    blocks = deepcopy(problem.blocks)
    K = len(blocks)
    return ScaledADMM(
        [blocks.module(k).train() for k in range(K)],
        problem.batches,
        rho=[solver.rho] * K,
        learning_rate=problem.batches[0].learning_rate * solver.local_lr,
        momentum=0.9,
        lam_step=solver.lam_step,
        kappa_step=solver.kappa_step,
        theta_steps=solver.theta_steps,
        z_steps=solver.z_steps,
        **more,
    )


def assert_follows(ranks, reference):
    """Weights, Z and U, on both sides of every cut, are those of the formulas."""
    for k, rank in enumerate(ranks):
        torch.testing.assert_close(rank.weights, list(reference.blocks[k].parameters()), **CLOSE)
    for k, (below, above) in enumerate(pairwise(ranks), 1):
        Z, U = (torch.cat([batch[k] for batch in kept]) for kept in (reference.Z, reference.U))
        for rank, names in ((below, BELOW), (above, ABOVE)):
            torch.testing.assert_close(rank.buffers[names[0]], Z, **CLOSE)
            torch.testing.assert_close(rank.buffers[names[1]] / reference.rho[k], U, **CLOSE)


@given(
    problems(batches=2),
    st.floats(1e-4, 10),
    st.just(0.0) | st.floats(1e-6, 1.5),
    st.sampled_from(["zero", "adjoint"]),
)
def test_with_one_full_step_of_everything_it_is_the_augmented_lagrangian_bit_for_bit(
    problem, beta, kappa_step, start
):
    same: dict[str, Any] = {"kappa_step": kappa_step, "multiplier_start": start, "local_lr": 0.3}
    other = deepcopy(problem)
    expected = trained(other, AugmentedLagrangian(beta=beta, lam_move="step", **same))
    found = trained(problem, BlockADMM(rho=2 * beta, order="jacobi", lam_step=1.0, **same))
    for before, after in zip(expected, found, strict=True):
        for a, b in zip(before, after, strict=True):
            assert a.buffers.keys() == b.buffers.keys()
            assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
            assert all(map(torch.equal, a.weights, b.weights))
            assert a.norms == b.norms


@given(st.floats(1e-3, 10), st.floats(0, 10), st.integers(0, 99))
def test_a_proximal_linearized_step_of_z_is_a_shorter_step(rho, tau, seed):
    """Of arXiv 2310.15334's kind: the adjoint linearized, the penalty exact, tau/2 ||z' - z||^2."""
    torch.manual_seed(seed)
    z, x, u, p = torch.randn(4, 5, 3, dtype=torch.float64)
    lam_step = rho / (rho + tau)
    new = step(z, x, rho * u, p, rho / 2, lam_step / rho).lam.requires_grad_()
    penalty, proximal = (new - x + u).square().sum(), (new - z).square().sum()
    (gradient,) = torch.autograd.grad((p * new).sum() + rho / 2 * penalty + tau / 2 * proximal, new)
    assert gradient.abs().max() < 1e-12 * (1 + rho + tau) * 10


@pytest.mark.parametrize("online", [False, True], ids=["windows", "online"])
@ORDERS
@pytest.mark.parametrize(("theta_steps", "z_steps"), [(1, 1), (2, 1), (1, 3), (2, 2)])
@given(
    problem=problems(batches=2),
    rho=st.floats(0.05, 1),
    kappa_step=st.floats(0.1, 1.0),
    start=st.sampled_from(["zero", "adjoint"]),
    sweeps=st.integers(1, 3),
)
@settings(max_examples=2, deadline=None, phases=(Phase.reuse, Phase.generate))
def test_its_iterates_are_those_of_the_scaled_form(
    order, theta_steps, z_steps, online, problem, rho, kappa_step, start, sweeps
):
    """Online, Z steps from the last cut or by hops, and then the weights."""
    steps = {"theta_steps": theta_steps, "z_steps": z_steps, "kappa_step": kappa_step, **CLASSIC}
    solver = BlockADMM(rho=rho, order=order, multiplier_start=start, return_ratio=1e9, **steps)
    reference = scaled(problem, solver)
    reference.start(adjoint=start == "adjoint")
    if online:
        found = swept_online(problem, solver, sweeps)
        reference.online(order, sweeps)
        assert_follows(found, reference)
        return
    for ranks in trained(problem, solver, windows=sweeps):
        norms = reference.sweep(order)
        assert_follows(ranks, reference)
        for rank, expected in zip(ranks[1:], norms, strict=True):
            assert rank.norms == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert ranks[0].norms is None


def swept_online(problem, solver, sweeps):
    """[rank] after so many sweeps of one window."""

    def program(block, links):
        mine = recorded(problem, solver, block, links, sweeps)
        mine.train(problem.window(sweeps))
        weights = [p.detach().clone() for p in block.module.parameters()]
        return Snapshot(buffers(block, mine, problem.samples), weights, None, [])

    return problem.on_every_block(program)


class Sphere(Projection):
    """C = {||z|| = 1 over the channels}."""

    def project(self, z):
        return z / z.norm(dim=1, keepdim=True)


def near(z, values):
    return (z.unsqueeze(-1) - torch.tensor(values, dtype=z.dtype)).abs().amin(-1) < 1e-12


MEMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "non-negative": lambda z: z >= 0,
    "box:-0.2:0.1": lambda z: (z >= -0.2) & (z <= 0.1),
    "quantized:2:-0.5:0.5": lambda z: near(z, [-0.5, -1 / 6, 1 / 6, 0.5]),
    "sign": lambda z: near(z, [-1.0, 1.0]),
    "sphere": lambda z: (z.norm(dim=1) - 1).abs() < 1e-12,
}


@ORDERS
@pytest.mark.parametrize(("constraint", "factor"), [*((held, 1) for held in MEMBER), ("sign", 2)])
def test_z_lies_in_its_set_after_every_sweep(order, constraint, factor, monkeypatch):
    monkeypatch.setitem(PROJECTIONS, "sphere", Sphere)
    problem = make_problem(seed=1, units=2, cuts=[1, 2], batch=4, batches=2)
    other, inside = deepcopy(problem), MEMBER[constraint]

    def program(block, links, held_to):
        solver = BlockADMM(rho=0.5, order=order, constraint=held_to, filter=factor, **LONG)
        mine = started(problem, solver, block, links)
        found = [buffers(block, mine, problem.samples)]
        for number in range(3):
            mine.sweep(problem.window(), number, exchange=True)
            found.append(buffers(block, mine, problem.samples))
        return found

    held = problem.on_every_block(lambda *rank: program(*rank, constraint))
    free = other.on_every_block(lambda *rank: program(*rank, "none"))
    pooled = factor > 1
    for rank in (1, 2):
        assert all(inside(sweep["lam"]).all() for sweep in held[rank])
        assert not any(inside(sweep["lam"]).all() for sweep in free[rank])
        # pooled, the other side's are means of members
        assert pooled or all(inside(sweep["target"]).all() for sweep in held[rank - 1])
    assert pooled or not torch.equal(held[2][-1]["lam"], held[2][0]["lam"])


@ORDERS
@pytest.mark.parametrize("z_steps", [1, 2])
def test_a_leading_projection_is_the_cuts_constraint_and_is_not_differentiated_through(
    order, z_steps
):
    torch.manual_seed(2)
    parts = [nn.Linear(4, 6), Sign(), nn.Linear(6, 5), Sign(), nn.Linear(5, 4)]
    blocks = split(nn.Sequential(*parts).double(), cuts=["1", "3"])
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 4, (8,))
    batches = [Batch(ids, 0.1, Fixed(x, y)) for ids in torch.arange(8).split(4)]
    problem = Problem(blocks, batches)
    # steps so long that Z is outside [-1, 1], where a straight-through gradient is zero
    solver = BlockADMM(rho=0.5, order=order, z_steps=z_steps, **LONG)

    def sign(z):
        return torch.where(z >= 0, 1.0, -1.0).double()

    reference = scaled(problem, solver, sets=[lambda z: z, sign, sign])
    whole = [list(block) for block in reference.blocks]
    without = [nn.Sequential(*units[bool(k) :]) for k, units in enumerate(whole)]
    reference.start(adjoint=False)
    reference.blocks = without
    for ranks in trained(problem, solver, start=started):
        reference.sweep(order)
        assert_follows(ranks, reference)
        for below, above in pairwise(ranks):
            assert torch.equal(below.buffers["target"], above.buffers["lam"])
            assert torch.equal(above.buffers["lam"].abs(), torch.ones_like(above.buffers["lam"]))
