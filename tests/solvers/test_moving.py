"""How lam, kappa and beta move between sweeps, in float64, against their formulas."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import buffers, make_problem, problems, recorded

from hybrid.solvers import AugmentedLagrangian, PhaseStats
from hybrid.solvers.kernels.operations import pool

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BETA = st.floats(1e-3, 10)


def exchanged(problem, solver, sweeps=2, exchanges=1):
    """[rank] -> what it keeps after exchanges of frozen weights, and x and p_in from then."""
    frozen = problem.frozen()
    rows = slice(0, frozen.samples)

    def program(block, links):
        mine = recorded(frozen, solver, block, links, sweeps)
        found = [buffers(block, mine, frozen.samples)]
        for number in range(exchanges):
            x, p_in = mine.gradient(frozen.batches[0], rows, True, PhaseStats())
            found[-1] |= {"x": x.clone()} | ({} if p_in is None else {"p_in": p_in.clone()})
            mine.sweep(frozen.window(), number, exchange=True)
            found.append(buffers(block, mine, frozen.samples))
        return found

    return frozen.on_every_block(program)


@given(problems(), BETA, st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_kappa_steps_in_proportion_to_lam(problem, beta, lam_step, kappa_step):
    solver = AugmentedLagrangian(
        beta=beta, lam_move="step", lam_step=lam_step, kappa_step=kappa_step
    )
    for below, above in pairwise(exchanged(problem, solver)):
        (old, new), x = above, below[0]["x"]
        pull = old["p_in"] + 2 * beta * (old["lam"] - x) + old["kappa_in"]
        lam = old["lam"] - lam_step / (2 * beta) * pull
        kappa = old["kappa_in"] + kappa_step * lam_step * 2 * beta * (lam - x)
        torch.testing.assert_close(new["lam"], lam, **CLOSE)
        torch.testing.assert_close(new["kappa_in"], kappa, **CLOSE)
        assert torch.equal(below[1]["kappa_out"], new["kappa_in"])


@given(problems(), BETA, st.floats(0.1, 1.0))
def test_the_limit_is_what_full_steps_come_to_and_takes_the_outputs_themselves(
    problem, beta, kappa_step
):
    limit = AugmentedLagrangian(beta=beta, kappa_step=kappa_step)
    near = AugmentedLagrangian(beta=1e7, lam_move="step", kappa_step=kappa_step)
    moved, stepped = (exchanged(problem, s, exchanges=2) for s in (limit, near))
    for below, above in pairwise(moved):
        for old, new in pairwise(above):
            wanted = (1 - kappa_step) * old["kappa_in"] - kappa_step * old["p_in"]
            torch.testing.assert_close(new["kappa_in"], wanted, **CLOSE)
        assert torch.equal(above[1]["lam"], below[0]["x"])
        assert torch.equal(below[1]["target"], below[0]["x"])
        assert torch.equal(below[1]["kappa_out"], above[1]["kappa_in"])
    for exact, other in zip(moved, stepped, strict=True):
        for name in exact[1].keys() & {"lam", "kappa_in", "target", "kappa_out"}:
            torch.testing.assert_close(other[1][name], exact[1][name], rtol=1e-5, atol=1e-5)


def test_under_a_filter_the_limit_takes_what_arrives_and_the_mean_adjoint():
    problem = make_problem(seed=2, units=3, cuts=[1, 3], batch=4)
    solver = AugmentedLagrangian(beta=0.1, filter=2)
    for below, above in pairwise(exchanged(problem, solver)):
        x, lam = pool(below[0]["x"], 2), above[1]["lam"]
        torch.testing.assert_close(pool(lam, 2), x, **CLOSE)
        torch.testing.assert_close(below[1]["target"], x, **CLOSE)
        torch.testing.assert_close(above[1]["kappa_in"], -4 * pool(above[0]["p_in"], 2), **CLOSE)
        assert torch.equal(below[1]["kappa_out"], above[1]["kappa_in"])
