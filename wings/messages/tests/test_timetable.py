"""The table of slots: its delays, and that slots which take what comes next give it."""

from fractions import Fraction
from math import ceil
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.solvers.engine.schedule import Kind
from hybrid_messages.by_unit.timetable import Timetable


def delays(units, slots, queue=0):
    return [Timetable(units, slots, queue).delay(u) for u in range(units)]


def test_the_table_is_the_one_that_is_drawn():
    """A letter for each M-th of a tick, capitals for backward passes, which take two."""
    rows = [{}, {}, {}]
    for op in (op for item in range(5) for op in Timetable(3, 2, 0).passes_of_tick(item)):
        if op.kind is Kind.FORWARD:
            rows[0][op.time] = "abc"[op.unit]
        else:
            rows[1 + op.item % 2] |= dict.fromkeys((op.time - 2, op.time - 1), "ABC"[op.unit])
    names = ["forward slot", "backward slot 0", "backward slot 1"]
    cells = ("".join(row.get(time, " ") for time in range(1 + max(row))) for row in rows)
    lines = [f"{name:18}{row}" for name, row in zip(names, cells, strict=True)]
    assert indent("\n".join(lines), " " * 8) in Timetable.__doc__


@pytest.mark.parametrize("M", [3, 4, 7, 12, 56])
@pytest.mark.parametrize("lag", [1, 2])
def test_a_lag_makes_every_gradient_as_many_ticks_later(M, lag):
    late = [Timetable(M, 2, 0, lag).delay(u) for u in range(M)]
    assert late == [lag + d for d in delays(M, 2)]


@pytest.mark.parametrize("M", [3, 4, 7, 12, 56])
def test_delays_are_those_of_the_page(M):
    assert delays(M, 2) == [ceil(3 * (1 - Fraction(u, M))) - 1 for u in range(M)]
    assert delays(M, 1) == [1 if u <= 2 * M / 3 - 1e-9 else 0 for u in range(M)]
    for q in (1, 5):
        assert delays(M, 0, q) == [q] * M
        assert delays(M, 1, q) == [q + d for d in delays(M, 1)]


def scheduled(units, slots, queue, items):
    """When passes begin, by giving each the first free slot; forward, and backward."""
    up, down, free, now = [], [], [0] * max(slots, 1), 0
    for n in range(items):
        if slots == 0:
            if n > queue:
                down.append(now)
                now += 2 * units
            up.append(now)
            now += units
            continue
        begin = up[-1] + units if up else 0
        up.append(max(begin, down[n - 1 - queue] if n > queue else 0))
        slot = free.index(min(free))
        down.append(max(up[-1] + units, free[slot]))
        free[slot] = down[-1] + 2 * units
    return up, down


@given(
    units=st.integers(1, 9),
    slots=st.integers(0, 2),
    queue=st.integers(0, 4),
    items=st.integers(1, 25),
    lag=st.integers(0, 5),
)
def test_the_table_is_what_slots_that_take_the_next_give(units, slots, queue, items, lag):
    table = Timetable(units, slots, queue, lag)
    up, down = scheduled(units, slots, queue, items)
    assert [table.forward_start(n) for n in range(items)] == up
    assert [table.backward_start(n) for n in range(len(down))] == down
    ops = [op for n in range(items) for op in table.passes_of_tick(n)]
    assert ops == sorted(ops, key=lambda op: (op.time, op.kind is Kind.FORWARD, *op))
    risen = [(op.item, op.unit) for op in ops if op.kind is Kind.FORWARD]
    assert risen == [(n, u) for n in range(items) for u in range(units)]
    left = dict.fromkeys(range(items), units)
    for op in ops:
        if op.kind is Kind.BACKWARD:
            left[op.item] -= 1
            assert op.unit == left[op.item], "from the head down"
    ends = {(op.item, op.unit): op.time for op in ops if op.kind is Kind.BACKWARD}
    steps = [op for op in ops if op.kind is Kind.STEP]
    assert all(ends[op.item, op.unit] + lag * units == op.time for op in steps)
    done = {(op.item, op.unit) for op in steps} if lag else {*ends}
    waits = {key for key in ends if table.step_waits(items, *key)}
    assert done == {*ends} - waits
    assert table.under_way(items) == [n for n in left.values() if n]
