"""Schedules: what they hold, how they are drawn, and where wrong ones stand still."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem
from trainings import assert_same

from hybrid.solvers import DDG, Backprop
from hybrid.solvers.base import Setup
from hybrid.solvers.engine.schedule import Action, Kind, Span, flushed, never_flushed, table
from hybrid.solvers.local_work.budget import LocalBudget

BLOCKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 12)


@given(BLOCKS, MICRO_BATCHES)
def test_block_k_holds_at_most_K_minus_k_graphs_in_a_flushed_pipeline(K, m):  # noqa: N802
    for k in range(K):
        held, most = 0, 0
        for action in flushed(k, K, Span.of([m])):
            held += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, held)
        assert most == min(m, K - k)


@given(st.integers(0, 9), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_pieces_of_a_schedule_are_the_schedule(delay, sizes):
    """A mini-batch at a time, as it is executed: whatever was under way before."""
    whole, pieces, ends = Span.of(sizes), [], set()
    for last in sorted(whole.ends):
        first = 1 + max(ends, default=-1)
        ends.add(last)
        pieces += never_flushed(delay, Span(first, last + 1, frozenset(ends)))
    pieces += never_flushed(delay, Span(whole.stop, whole.stop, whole.ends, drains=True))
    assert pieces == never_flushed(delay, whole)
    steps = [a.micro_batch for a in pieces if a.kind is Kind.STEP]
    assert steps == sorted(whole.ends)


def test_schedules_are_drawn_as_their_docstrings_show_them():
    drawing = table([flushed(k, 3, Span.of([4])) for k in range(3)])
    assert indent(drawing, " " * 8) in flushed.__doc__
    budgets = [LocalBudget(1, 0), LocalBudget(), LocalBudget(0, 1)]
    late = [never_flushed(2 - k, Span.of([2, 2]), each) for k, each in enumerate(budgets)]
    assert indent(table(late), " " * 8) in never_flushed.__doc__


def test_a_table_marks_what_each_block_of_a_wrong_schedule_waits_for():
    one, other = (flushed(k, 2, Span.of([3])) for k in range(2))
    with pytest.raises(ValueError, match="no block can go on") as caught:
        table([one, other[-2::-1]])
    assert str(caught.value).splitlines()[1:] == ["block 0   F0  F1  B0?", "block 1   B2?"]


def test_messages_in_another_order_are_refused():
    passes = [Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 1)]
    back = [Action(Kind.BACKWARD, 0), Action(Kind.BACKWARD, 1)]
    with pytest.raises(ValueError, match="blocks 0 and 1 take their backward passes in different"):
        table([[*passes, *back], [*passes, *back[::-1]]])


def test_a_schedule_from_outside_is_executed_as_it_is():
    """That of docs/your-own-solver.md adds up the same gradients in the same order."""
    page = (Path(__file__).parents[3] / "docs" / "your-own-solver.md").read_text()
    code = next(part for part in page.split("```python")[1:] if "class GPipe" in part)
    names = {"__name__": __name__, "dataclass": dataclass, "ClassVar": ClassVar}
    exec(code.partition("```")[0], names)
    pipe, plain = (make_problem(seed=3, units=3, cuts=[1, 2], batch=8, batches=2) for _ in range(2))
    for problem, solver in ((pipe, names["GPipe"]), (plain, Backprop)):
        program = partial(trained, problem, solver(micro_batches=4))
        problem.on_every_block(program)
    assert_same(pipe.tensors(), plain.tensors())


def trained(problem, solver, block, links):
    solver.start(block, links, problem.setup()).train(problem.window())


class Growing(DDG):
    """Its later blocks are later."""

    def delay(self, index, count):
        return index


def test_a_method_whose_blocks_would_wait_for_each_other_is_refused_with_its_table():
    with pytest.raises(ValueError, match=r"(?s)stand still.*block 0   F0  B0\?.*block 1       F0"):
        Growing().check(Setup(shapes=((1,),), batch_size=4))
