"""The static order of a pipelined pass."""

from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.solvers.exact.pipeline import Kind, drawn, pass_order

BLOCKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 12)


@given(BLOCKS, MICRO_BATCHES)
def test_block_k_holds_at_most_K_minus_k_graphs(K, m):  # noqa: N802
    for k in range(K):
        held, most = 0, 0
        for op in pass_order(k, K, m):
            held += 1 if op.kind is Kind.FORWARD else -1
            most = max(most, held)
        assert most == min(m, K - k)


def test_the_order_is_the_one_drawn():
    drawing = drawn([pass_order(k, 3, 4) for k in range(3)])
    assert indent(drawing, " " * 8) in pass_order.__doc__


def test_a_drawing_marks_what_each_block_of_a_wrong_timetable_waits_for():
    with pytest.raises(ValueError, match="no block can go on") as caught:
        drawn([pass_order(0, 2, 3), pass_order(1, 2, 3)[::-1]])
    assert str(caught.value).splitlines()[1:] == ["block 0   F0  F1  B0?", "block 1   B2?"]
