"""The windowed sweeps of the penalty and augmented Lagrangian methods."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import assert_weights_moved, buffers, make_problem, problems, recorded

from hybrid.solvers import AugmentedLagrangian, Penalty
from hybrid.solvers.kernels.operations import pool
from hybrid.solvers.splitting.penalty import IN_WINDOWS


def swept(problem, solver, sweeps=1):
    """The statistics of each rank's phase."""
    return problem.on_every_block(
        lambda *rank: recorded(problem, solver, *rank, sweeps).train(problem.window(sweeps))
    )


@pytest.mark.parametrize("solver", [Penalty(), AugmentedLagrangian()], ids=repr)
def test_a_single_sweep_sends_nothing_and_trains_every_block_but_for_statistics(solver):
    problem = make_problem(seed=1, units=3, cuts=[1, 2], batch=4, batches=3)
    before = problem.tensors()

    def program(block, links):
        mine = recorded(problem, solver, block, links)
        sent, waited = links.traffic.total_bytes, links.traffic.total_waiting
        mine.train(problem.window())
        return links.traffic.total_bytes - sent, links.traffic.total_waiting - waited

    assert problem.on_every_block(program) == [(0, 0.0)] * 3
    assert_weights_moved(problem, before)


@given(
    problems(batches=2),
    st.sampled_from([1, 2]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["step", "limit"]),
)
def test_both_sides_of_a_cut_agree_after_an_exchange(problem, factor, storage, move):
    solver = AugmentedLagrangian(
        lam_move=move, filter=factor, storage=storage, beta=1.0, lam_step=0.1
    )
    problem = problem.single_precision()

    def program(block, links):
        mine = recorded(problem, solver, block, links, sweeps=2)
        mine.sweep(problem.window(), 0, exchange=True)
        return buffers(block, mine, problem.samples)

    ranks = problem.on_every_block(program)
    for below, above in pairwise(ranks):
        assert torch.equal(below["kappa_out"], above["kappa_in"])
        own, exact = pool(above["lam"], factor), factor == 1 and storage == "float32"
        close = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(below["target"], own, check_dtype=False, **close)


@pytest.mark.parametrize("sweeps", [1, 2])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Penalty, AugmentedLagrangian])
def test_the_store_takes_the_memory_it_said(kind, storage, sweeps):
    problem = make_problem(seed=1, units=3, cuts=[1, 2], batch=4, batches=2).single_precision()
    solver = kind(storage=storage, filter=2, beta=1.0, lam_step=0.01)

    def program(block, links):
        mine = recorded(problem, solver, block, links, sweeps)
        mine.train(problem.window(sweeps))
        held = sum(b.numel() * b.element_size() for b in mine.store._buffers.values())
        return held, solver.memory(problem.setup(sweeps), block.index)

    for held, said in problem.on_every_block(program):
        assert held == said > 0


def test_local_clipping_bounds_each_block_by_itself():
    problem = make_problem(seed=1, units=3, cuts=[2], batch=4)
    free, clipped = AugmentedLagrangian(), AugmentedLagrangian(clip_norm=1e-3)

    def moved(solver):
        def program(block, links):
            mine = recorded(problem, solver, block, links)
            before = torch.nn.utils.parameters_to_vector(block.module.parameters()).clone()
            mine.train(problem.window())
            after = torch.nn.utils.parameters_to_vector(block.module.parameters())
            return float((after - before).detach().norm())

        return problem.on_every_block(program, momentum=0.0)

    rate = problem.batches[0].learning_rate * IN_WINDOWS
    assert moved(clipped) == pytest.approx([1e-3 * rate] * 2, rel=1e-2)
    assert all(m > 1e-2 * rate for m in moved(free))


def test_sweeping_stops_when_the_residual_grows_too_fast_and_says_so():
    problem = make_problem(seed=1, units=3, cuts=[2], batch=4, batches=2)
    wild = AugmentedLagrangian(
        beta=1.0, lam_move="step", lam_step=20.0, kappa_step=0.05, return_ratio=1.2
    )
    first, last = swept(problem, wild, 20)
    assert first.steps == last.steps < 40
    assert first.notices == last.notices
    left_out = 20 - first.steps // 2
    assert first.notices[0].endswith(
        f"(1.2) times from one sweep to the next: {left_out} sweeps left out"
    )


def test_shuffled_sweeps_meet_every_stored_sample_with_its_own_variables():
    problem = make_problem(seed=1, units=2, cuts=[1], batch=4, batches=3)
    frozen = problem.frozen()
    permutation = torch.randperm(12, generator=torch.Generator().manual_seed(0))

    def program(block, links):
        for module in block.module.modules():
            module.eval()
        mine = recorded(frozen, AugmentedLagrangian(), block, links)
        window = frozen.window()
        window.shuffle = lambda sweep: permutation
        assert sorted(torch.cat([b.ids for _, b in window.sweep(0)]).tolist()) == list(range(12))
        return mine.train(window).residual()

    assert max(problem.on_every_block(program)) < 1e-12
