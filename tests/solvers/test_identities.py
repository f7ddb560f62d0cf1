"""Identities 1 to 3 of the penalty and augmented Lagrangian methods, in float64."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import gradients, make_problem, problems, recorded

from hybrid.solvers import AugmentedLagrangian, Penalty, PhaseStats

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BETA = st.floats(1e-4, 10)


def local_gradients(problem, solver):
    """Every block's gradient of its own sub-problem, all blocks at once."""

    def program(block, links):
        mine = recorded(problem, solver, block, links)
        mine.gradient(problem.batches[0], slice(0, problem.samples), False, PhaseStats())
        return gradients(block)

    return {k: v for part in problem.on_every_block(program) for k, v in part.items()}


def swept_gradients(problem, solver, sweeps):
    """[rank][sweep] -> local gradients, while lam (and kappa) move and the weights are frozen."""
    frozen = problem.frozen()

    def program(block, links):
        mine = recorded(frozen, solver, block, links, sweeps=2)
        found, step = [], block.step

        def watched_step(*arguments):
            found.append(gradients(block))
            step(*arguments)

        block.step = watched_step  # type: ignore[method-assign]
        for number in range(sweeps):
            mine.sweep(frozen.window(), number, exchange=True)
        return found

    return frozen.on_every_block(program)


def settled(problem, solver, sweeps):
    """[rank] -> lam, p_in and x after many exchanges at frozen weights."""
    frozen = problem.frozen()

    def program(block, links):
        mine = recorded(frozen, solver, block, links, sweeps=2)
        window, rows = frozen.window(), slice(0, frozen.samples)
        for number in range(sweeps):
            mine.sweep(window, number, exchange=True)
        x, p_in = mine.gradient(frozen.batches[0], rows, True, PhaseStats())
        lam = None if block.first else mine.store.raw("lam", rows).clone()
        return {"x": x, "p_in": p_in, "lam": lam}

    return frozen.on_every_block(program)


@given(problems(), BETA)
def test_identity_1_adjoint_multipliers_give_every_block_the_exact_gradient(problem, beta):
    local = local_gradients(problem, AugmentedLagrangian(beta=beta))
    for name, exact in problem.plain_gradients(problem.batches[0]).items():
        torch.testing.assert_close(local[name], exact, **CLOSE)


@given(problems(), BETA, st.floats(0.05, 1.0) | st.just(1.0))
def test_identity_2_the_exact_signal_climbs_one_block_a_sweep_and_is_damped_by_lam_step(
    problem, beta, lam_step
):
    exact = problem.plain_gradients(problem.batches[0])
    blocks = len(problem.blocks)
    solver = Penalty(beta=beta, lam_step=lam_step, lam_start="feasible")
    found = swept_gradients(problem, solver, blocks)
    for rank in range(blocks):
        arrival = blocks - 1 - rank
        for sweep in range(arrival):
            assert not any(g.any() for g in found[rank][sweep].values())
        for name, gradient in found[rank][arrival].items():
            torch.testing.assert_close(gradient, lam_step**arrival * exact[name], **CLOSE)


@given(st.integers(0, 10_000), BETA)
def test_a_stepped_start_gives_the_first_of_two_blocks_the_exact_gradient_at_once(seed, beta):
    problem = make_problem(seed=seed, units=3, cuts=[2], batch=4)
    exact = problem.plain_gradients(problem.batches[0])
    local = local_gradients(problem, Penalty(beta=beta, lam_step=1.0, lam_start="stepped"))
    for name, _ in problem.blocks.module(0).named_parameters():
        name = problem.blocks.module(0).global_name(name)
        torch.testing.assert_close(local[name], exact[name], **CLOSE)


def test_identity_3_the_penalty_method_settles_off_the_constraint_by_p_over_2_beta_and_no_other():
    problem = make_problem(seed=3, units=4, cuts=[2, 3], batch=4)
    biased = Penalty(beta=10.0, lam_step=0.2, lam_start="feasible")
    free = AugmentedLagrangian(
        lam_move="step", beta=10.0, lam_step=0.2, kappa_step=5.0, multiplier_start="zero"
    )
    for before, after in pairwise(settled(problem, biased, sweeps=500)):
        residual = after["lam"] - before["x"]
        assert residual.norm() > 1e-4
        torch.testing.assert_close(residual, -after["p_in"] / (2 * 10.0), **CLOSE)
    for before, after in pairwise(settled(problem, free, sweeps=500)):
        torch.testing.assert_close(after["lam"], before["x"], **CLOSE)
