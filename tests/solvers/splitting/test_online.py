"""Online sweeps: what the two sides of a cut hold after a dual step, and when all ranks stop."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import buffers, copied, exact_pass, make_problem, problems
from trainings import assert_same

from hybrid.links import run_threads, run_virtual
from hybrid.solvers import BlockADMM

ORDERS = pytest.mark.parametrize("order", ["jacobi", "gauss-seidel"])
FILTER = 2
STEPS: dict[str, Any] = {"rho": 0.5, "lam_step": 0.3, "local_lr": 0.05, "return_ratio": 1e9}


def swept(problem, solver, corrected, **wire):
    """[rank] -> what it keeps of its cuts, as stored, after two sweeps with a dual step each."""

    def program(block, links):
        mine = solver.start(block, links, problem.setup(sweeps=3))
        exact = exact_pass(block, links, **wire)
        (exact.observe if corrected else exact.propagate)(problem.window(), mine)
        start = buffers(block, mine, problem.samples)
        for number in range(2):
            mine.sweep(problem.window(), number, exchange=True)
        kept = copied(mine.store._buffers)
        if not block.first:
            kept["Z"] = mine.variables.shared_lam(mine.variables.lam(slice(0, problem.samples)))
        return start, kept

    return problem.on_every_block(program)


@ORDERS
@given(
    problem=problems(batches=2),
    storage=st.sampled_from(["bfloat16", "float16", "float32"]),
    z_steps=st.integers(1, 3),
    constraint=st.sampled_from(["none", "box:-0.2:0.3"]),
    corrected=st.booleans(),
)
def test_both_sides_of_a_downsampled_cut_in_16_bits_hold_the_same_bits_after_a_dual_step(
    order, problem, storage, z_steps, constraint, corrected
):
    solver = BlockADMM(
        order=order,
        filter=FILTER,
        storage=storage,
        z_steps=z_steps,
        constraint=constraint,
        **STEPS,
    )
    ranks = swept(problem.single_precision(), solver, corrected)
    for (_, below), (start, above) in pairwise(ranks):
        assert below["target"].dtype is above["Z"].dtype is getattr(torch, storage)
        assert below["target"].shape[2:] == (6 // FILTER, 6 // FILTER)
        assert torch.equal(below["target"], above["Z"])
        assert torch.equal(below["kappa_out"], above["kappa_in"])
        assert torch.equal(below["sent"], above["x"])
        assert not torch.equal(above["kappa_in"].float(), start["kappa_in"])
        assert not torch.equal(above["lam"].float(), start["lam"])


BATCHES, SWEEPS = 2, 8


def visits(order, ratio, run=run_threads, sweeps=SWEEPS):
    """[rank] -> [window] -> (residual after each sweep, steps, notices); and the network after."""
    problem = make_problem(seed=1, units=3, cuts=[1, 2, 3], batch=4, batches=BATCHES)
    wild = BlockADMM(
        rho=1.0, order=order, lam_step=1.9, kappa_step=1.5, local_lr=0.3, return_ratio=ratio
    )

    def program(block, links):
        mine = wild.start(block, links, problem.setup(sweeps))
        found, sweep = [], mine.sweep
        for _ in range(2):
            residuals = []

            def watched(*given, residuals=residuals):
                stats = sweep(*given)
                residuals.append(stats.residual())
                return stats

            mine.sweep = watched
            exact_pass(block, links).propagate(problem.window(), mine)
            stats = mine.train(problem.window(sweeps))
            found.append((residuals, stats.steps, stats.notices))
        return found

    return problem.on_every_block(program, run=run), problem.tensors()


@ORDERS
@pytest.mark.parametrize("ratio", [1.2, 2.0])
def test_all_ranks_stop_after_the_sweep_in_which_one_cuts_residual_has_grown_too_much(order, ratio):
    ranks, network = visits(order, ratio)
    free = [rank[0][0] for rank in visits(order, 1e9)[0]]
    grown = [[new > ratio * old > 0 for old, new in pairwise(rank)] for rank in free]
    # the first sweep and the last one are not compared
    compared = list(zip(*grown, strict=True))[1:-1]
    last = next((n for n, cuts in enumerate(compared, 2) if any(cuts)), SWEEPS - 1)
    assert last == SWEEPS - 1 or not all(compared[last - 2][:-1]), "at some cuts it has not grown"
    for rank, residuals in zip(ranks, free, strict=True):
        assert rank[0][:2] == (residuals[: last + 1], (last + 1) * BATCHES)
    for window in zip(*ranks, strict=True):
        ((steps, *notices),) = {(steps, *notices) for _, steps, notices in window}
        assert len(notices) == (steps < SWEEPS * BATCHES)
    others, same = visits(order, ratio, run_virtual)
    assert others == ranks
    assert_same(same, network)
