"""Local steps in the waits of a delayed pipeline, against the same in one process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import copied
from trainings import assert_same
from unit_steps import MOMENTUM, numbered, unit_problem
from versions_table import Table

from hybrid.links import run_threads, run_virtual
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, FeaturesReplay, Penalty
from hybrid.solvers.block import Block
from hybrid.solvers.engine.policies import KeepGraph, StashWeights
from hybrid.solvers.engine.schedule import Kind, Span, never_flushed
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.local_work.work import STORED_BATCHES, LocalWork

FILL = AugmentedLagrangian(beta=0.3, local_lr=0.7)
METHODS = {
    "ddg": DDG(micro_batches=3),
    "fdg": FDG(micro_batches=3, gradient_shrinking=0.7),
    "features-replay": FeaturesReplay(micro_batches=3),
}
UNEVEN = [(2, 1), (0, 0), (0, 3)]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def made(K, batch=9, batches=6):
    return numbered(unit_problem(K, batches, batch, units=7))


def laid_out(K):
    """As in training: what a checkpoint gives back is laid out like this."""
    problem = made(K).single_precision()
    problem.blocks.model.to(memory_format=torch.channels_last)
    return problem


def filled(problem, solver, waits, fill=FILL, at=None, run=run_threads, before=None):
    """All tensors after training, broken off and gone on with at `at`; and bytes sent.

    `before`: the solver, the waits and the local method until then, where they were others.
    """
    first = before or (solver, waits, fill)

    def start(block, links, solver=solver, waits=waits, fill=fill):
        setup = problem.setup(window=0)
        program = solver.start(block, links, setup)
        if waits is not None:
            records = replace(setup, stored_batches=STORED_BATCHES, local_work=True)
            local = fill.start(block, links, records)
            program.local_work = LocalWork(local, LocalBudget(*waits[block.index]))
        return program

    def program(block, links):
        mine = start(block, links, *first)
        if at is not None:
            mine.train(problem.window(1, 0, at))
            state = type(mine.state())(flight=copied(mine.state().flight))
            block.module.zero_grad()
            mine = start(block, links)
            if mine.local_work is not None:
                mine.local_work.expect(problem.batches[:at], compatible=first[2] is fill)
            mine.load_state(state)
        mine.train(problem.window(1, at or 0))
        mine.drain()
        assert mine.state().flight == {}
        steps = mine.local_work.stats.steps if mine.local_work else 0
        return links.traffic.total_bytes, steps

    sent, problem.steps = zip(*problem.on_every_block(program, MOMENTUM, run), strict=True)
    problem.sent = sum(sent)
    return problem.tensors()


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=4, deadline=None)
@given(
    K=st.sampled_from([2, 3, 5]),
    m=st.integers(1, 4),
    batch=st.integers(4, 11),
    draws=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=5, max_size=5),
    penalty=st.booleans(),
)
@example(K=3, m=3, batch=9, draws=[(2, 1), (0, 0), (0, 3), (0, 0), (0, 0)], penalty=False)
def test_filled_ticks_equal_a_table_of_versions(name, K, m, batch, draws, penalty):
    solver = replace(METHODS[name], micro_batches=m)
    fill = Penalty(beta=0.3, local_lr=0.7, lam_start="feasible") if penalty else FILL
    table = Table(made(K, batch), name, m, draws[:K], fill)
    expected = table.run()
    found = filled(made(K, batch), solver, draws[:K], fill)
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], **CLOSE)


@pytest.mark.parametrize("name", METHODS)
def test_where_nobody_waits_it_is_the_method_bit_for_bit(name):
    plain = filled(made(3), METHODS[name], None)
    assert_same(filled(made(3), METHODS[name], [(0, 0)] * 3), plain)


@pytest.mark.parametrize(
    "solver",
    [*METHODS.values(), DDG(micro_batches=3, recompute=True), DDG(micro_batches=3, stash=False)],
    ids=lambda solver: f"{solver.name}, {vars(solver)}"[:60],
)
def test_local_steps_send_nothing_and_go_on_from_a_checkpoint_bit_for_bit(solver):
    whole, plain = laid_out(3), laid_out(3)
    expected = filled(whole, solver, UNEVEN)
    filled(plain, solver, None)
    assert whole.sent == plain.sent
    for at in 2, 3:
        assert_same(filled(laid_out(3), solver, UNEVEN, at=at), expected)
    assert_same(filled(laid_out(3), solver, UNEVEN, run=run_virtual), expected)


@pytest.fixture
def _unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


MORE, FEWER, M = [(2, 1), (1, 0), (0, 3)], [(1, 1), (0, 0), (0, 2)], 3
ANEW = (2 * 2 * M, 2 * M, 2 * M)
"""Local steps in the last two of three mini-batches, of which the first has records."""
OTHERS = {
    "more local work": (METHODS["ddg"], FEWER, FILL, ANEW),
    "none before": (METHODS["ddg"], None, FILL, ANEW),
    "none on some blocks": (METHODS["ddg"], [(0, 0), (0, 0), (0, 3)], FILL, (*ANEW[:2], 3 * M)),
    "another local method": (METHODS["ddg"], MORE, Penalty(beta=0.3), ANEW),
    # what is under way works on records that are cut alike, as is one of (0, 3), (3, 5), ...
    "larger micro-batches": (DDG(micro_batches=2), MORE, FILL, (ANEW[0] + 4, ANEW[1] + 1, 2 * M)),
    "larger ones, and less": (DDG(micro_batches=2), FEWER, FILL, ANEW),
    "smaller ones": (DDG(micro_batches=4), MORE, FILL, (ANEW[0] + 4, ANEW[1] + 2, 2 * M + 1)),
}


@pytest.mark.usefixtures("_unwritten_memory_is_nan")
@pytest.mark.parametrize("kind", OTHERS)
def test_records_that_a_resume_leaves_out_are_made_anew_before_they_are_read(kind):
    problem, (*before, steps) = made(3), OTHERS[kind]
    found = filled(problem, METHODS["ddg"], MORE, at=3, before=before)
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert problem.steps == steps


def test_less_local_work_goes_on_with_the_records_of_more():
    problem = made(3)
    filled(problem, METHODS["ddg"], FEWER, at=3, before=(METHODS["ddg"], MORE, FILL))
    # block 0 has two of the last mini-batch's three micro-batches under way, at the resume
    assert problem.steps == (2 * (2 + 3 * M), 0, 3 * M)


def test_random_layers_draw_other_numbers_for_every_local_step(monkeypatch):
    forward, keys = Block.forward, [set() for _ in range(3)]
    passes = [0] * 3

    def noted(block, lam, key=None, *rest, **more):
        if key is not None and key[0] == 1:
            keys[block.index].add(key)
            passes[block.index] += 1
        return forward(block, lam, key, *rest, **more)

    monkeypatch.setattr(Block, "forward", noted)
    filled(made(3), METHODS["ddg"], MORE)
    assert passes == [5 * 2 * M, 5 * M, 5 * M]
    assert [len(own) for own in keys] == passes


def test_a_graph_that_is_made_again_gives_the_same_records():
    plain = filled(made(3), DDG(micro_batches=3), UNEVEN)
    assert_same(filled(made(3), DDG(micro_batches=3, recompute=True), UNEVEN), plain)


def test_local_work_leaves_statistics_weights_and_the_gradient_alone(monkeypatch):
    work, worked = LocalWork.add_gradient, []

    def watched(filling, flight, first, count):
        module = filling.block.module
        before = copied(module.state_dict())
        gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        steps = filling.stats.steps
        work(filling, flight, first, count)
        assert_same(module.state_dict(), before)
        for p, gradient in zip(module.parameters(), gradients, strict=True):
            assert (p.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(p.grad, gradient)
        worked.append((filling.block.index, filling.stats.steps - steps))

    monkeypatch.setattr(LocalWork, "add_gradient", watched)
    filled(made(3), METHODS["ddg"], UNEVEN)
    # five mini-batches follow another, each in three micro-batches
    done = [sum(n for block, n in worked if block == k) for k in range(3)]
    assert done == [30, 0, 15]


@pytest.mark.parametrize("name", ["ddg", "fdg"])
def test_a_program_goes_in_the_order_of_its_timetable(name, monkeypatch):
    m, batches, seen = 3, 4, [list[tuple[Kind, int]]() for _ in range(3)]

    def noting(policy, method, kind):
        plain = getattr(policy, method)

        def noted(self, flight, *arguments):
            seen[self.block.index].append((kind, m * flight.part.step + flight.part.number))
            return plain(self, flight, *arguments)

        monkeypatch.setattr(policy, method, noted)

    for policy in (KeepGraph, StashWeights):
        noting(policy, "forward", Kind.FORWARD)
        noting(policy, "backward", Kind.BACKWARD)
    work, step = LocalWork.add_gradient, Block.step

    def worked(local, part, first, count):
        seen[local.block.index].append((Kind.LOCAL, m * part.step + part.number))
        work(local, part, first, count)

    def stepped(block, *arguments):
        (*_, (_, item)) = seen[block.index]
        seen[block.index].append((Kind.STEP, item))
        step(block, *arguments)

    monkeypatch.setattr(Block, "step", stepped)

    monkeypatch.setattr(LocalWork, "add_gradient", worked)
    solver = METHODS[name]
    filled(made(3, batches=batches), solver, UNEVEN)
    for k, found in enumerate(seen):
        budget = LocalBudget(*UNEVEN[k])
        order = never_flushed(solver.delay(k, 3), Span.of([m] * batches), budget)
        assert found == [(action.kind, action.micro_batch) for action in order], k


def test_a_local_gradient_is_clipped_by_itself():
    solver, fill = METHODS["ddg"], replace(FILL, clip_norm=1e-30)
    plain, found = filled(made(3), solver, None), filled(made(3), solver, UNEVEN, fill)
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
