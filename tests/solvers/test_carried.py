"""Auxiliary variables and multipliers carried over to other cuts of the same network."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem, copied, exact_pass, make_problem, started
from torch import Tensor

from hybrid.networks.partition.split import split
from hybrid.solvers import AugmentedLagrangian, BlockADMM, Penalty
from hybrid.solvers.state import State

CUTS = st.lists(st.integers(1, 5), max_size=4, unique=True).map(sorted)
SOLVERS = [
    Penalty(beta=0.1, lam_start="feasible"),
    AugmentedLagrangian(beta=0.1),
    BlockADMM(rho=0.3),
]


def cut_anew(problem, cuts):
    return Problem(split(problem.blocks.model, cuts=[str(c) for c in cuts]), problem.batches)


def swept(problem, solver):
    """What is kept at each cut after three sweeps."""

    def program(block, links):
        mine = started(problem, solver, block, links)
        mine.train(problem.window(3))
        return copied(mine.state().cut)

    return dict(zip(problem.blocks.cuts, problem.on_every_block(program)[1:], strict=True))


def carried(problem, solver, kept, exact=False):
    """Programs that have taken back what was kept at the cuts that still are, and begun."""
    named = ["", *problem.blocks.cuts, ""]

    def program(block, links):
        mine = solver.start(block, links, problem.setup(carried=True))
        before, after = (dict(kept.get(cut, {})) for cut in named[block.index : block.index + 2])
        mine.load_state(State(cut=before, after=after))
        begin = exact_pass(block, links)
        (begin.observe if exact else begin.propagate)(problem.window(), mine)
        return block, mine

    return problem.on_every_block(program)


def stored(ranks, name, rank):
    _, mine = ranks[rank]
    found: Tensor = mine.store.raw(name, slice(0, mine.store.samples))
    return found


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.name)
@given(before=CUTS, after=CUTS, seed=st.integers(0, 999))
def test_what_was_kept_at_a_cut_that_stays_is_kept_and_new_cuts_start_feasible(
    solver, before, after, seed
):
    problem = make_problem(seed, units=5, cuts=before, batch=3, batches=2)
    kept = swept(problem, solver)
    again = cut_anew(problem, after)
    ranks = carried(again, solver, kept)
    for k, cut in enumerate(again.blocks.cuts):
        multiplied = type(solver) is not Penalty
        if cut in kept:
            assert torch.equal(stored(ranks, "lam", k + 1), kept[cut]["lam"])
            assert torch.equal(stored(ranks, "target", k), kept[cut]["lam"])
            if multiplied:
                assert torch.equal(stored(ranks, "kappa_in", k + 1), kept[cut]["kappa_in"])
                assert torch.equal(stored(ranks, "kappa_out", k), kept[cut]["kappa_in"])
        else:
            assert torch.equal(stored(ranks, "target", k), stored(ranks, "lam", k + 1))
            if multiplied:
                assert not stored(ranks, "kappa_in", k + 1).any()
                assert not stored(ranks, "kappa_out", k).any()
            block, mine = ranks[k]
            for rows, batch in problem.window().recorded():
                lam = batch.images() if block.first else mine.variables.lam(rows)
                assert torch.equal(block.forward(lam), mine.store.raw("target", rows))


def test_an_exact_pass_replaces_what_was_carried():
    problem = make_problem(1, units=3, cuts=[2], batch=3)
    solver = AugmentedLagrangian(beta=0.1)
    kept = swept(problem, solver)
    ranks = carried(problem, solver, kept, exact=True)
    assert not torch.equal(stored(ranks, "lam", 1), kept["2"]["lam"])
    assert torch.equal(stored(ranks, "lam", 1), stored(ranks, "target", 0))
