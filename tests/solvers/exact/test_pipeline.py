"""The static orders of a pipelined pass, and the local work that fits its gaps."""

from collections import deque
from itertools import pairwise
from textwrap import indent

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.solvers.exact.gaps import LOCAL_COST, Cost, Gaps, PassTimes, fit_gaps, pass_times
from hybrid.solvers.exact.pipeline import Kind, drawn, pass_order

BLOCKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 12)


@st.composite
def pipelines(draw):
    """Unbalanced costs of 1 to 6 blocks, a number of micro-batches, and transfers between them."""
    blocks = draw(st.integers(1, 6))
    cost = st.builds(Cost, st.floats(0.1, 5.0), st.floats(0.1, 10.0))
    costs = draw(st.lists(cost, min_size=blocks, max_size=blocks))
    transfer = st.floats(0.0, 3.0)
    transfers = draw(st.just([]) | st.lists(transfer, min_size=blocks - 1, max_size=blocks - 1))
    return costs, draw(MICRO_BATCHES), transfers


class Simulated:
    """Runs the orders of `passes` passes as ranks would: each waits for what it receives.

    A wire carries one message at a time in each direction; local work takes `gaps` samples, and a
    rank that has ended a pass starts the next at once.
    """

    def __init__(self, costs, samples, m, transfers, gaps, passes=4):
        K, n = len(costs), samples / m
        wires = [t * n for t in transfers] or [0.0] * (K - 1)
        work = [deque(pass_order(k, K, m, gaps[k]) * passes) for k in range(K)]
        clock = [0.0] * K
        up: list[deque[float]] = [deque() for _ in range(K)]
        down: list[deque[float]] = [deque() for _ in range(K)]
        up_free, down_free = [0.0] * K, [0.0] * K
        forwards = [0] * K
        self.starts: list[list[float]] = [[] for _ in range(K)]
        """When each block began each pass."""
        while any(work):
            moved = False
            for k in range(K):
                while work[k] and self._ready(work[k][0], k, K, up, down):
                    moved = True
                    op = work[k].popleft()
                    if op.kind is Kind.FORWARD:
                        if k > 0:
                            clock[k] = max(clock[k], up[k].popleft())
                        if forwards[k] % m == 0:
                            self.starts[k].append(clock[k])
                        forwards[k] += 1
                        clock[k] += costs[k].forward * n
                        if k < K - 1:
                            up_free[k] = max(up_free[k], clock[k]) + wires[k]
                            up[k + 1].append(up_free[k])
                    elif op.kind is Kind.BACKWARD:
                        if k < K - 1:
                            clock[k] = max(clock[k], down[k].popleft())
                        clock[k] += costs[k].backward * n
                        if k > 0:
                            down_free[k] = max(down_free[k], clock[k]) + wires[k - 1]
                            down[k - 1].append(down_free[k])
                    else:
                        share = gaps[k].middle if op.kind is Kind.MIDDLE else gaps[k].turn
                        clock[k] += share * sum(costs[k])
            assert moved, "every rank waits"
        self.end = max(clock)

    @staticmethod
    def _ready(op, k, K, up, down):
        if op.kind is Kind.FORWARD:
            return k == 0 or bool(up[k])
        return op.kind is not Kind.BACKWARD or k == K - 1 or bool(down[k])

    @property
    def periods(self):
        return [later - earlier for earlier, later in pairwise(self.starts[0])]


@given(BLOCKS, MICRO_BATCHES)
def test_without_gaps_block_k_holds_at_most_K_minus_k_graphs(K, m):  # noqa: N802
    for k in range(K):
        held, most = 0, 0
        for op in pass_order(k, K, m):
            held += 1 if op.kind is Kind.FORWARD else -1
            most = max(most, held)
        assert most == min(m, K - k)


@pytest.mark.parametrize("gaps", [None, Gaps()])
def test_the_orders_are_those_drawn(gaps):
    drawing = drawn([pass_order(k, 3, 4, gaps) for k in range(3)])
    assert indent(drawing, " " * 8) in pass_order.__doc__


def test_a_drawing_marks_what_each_block_of_a_wrong_timetable_waits_for():
    with pytest.raises(ValueError, match="no block can go on") as caught:
        drawn([pass_order(0, 2, 3), pass_order(1, 2, 3)[::-1]])
    assert str(caught.value).splitlines()[1:] == ["block 0   F0  F1  B0?", "block 1   B2?"]


@given(pipelines())
def test_the_timetable_has_the_period_of_a_simulated_pass(pipeline):
    costs, m, transfers = pipeline
    simulated = Simulated(costs, 12, m, transfers, [Gaps()] * len(costs))
    period = pass_times(costs, 12, m, transfers).period
    assert simulated.periods == pytest.approx([period] * 3)


@given(pipelines(), st.integers(1, 16))
def test_work_that_fits_the_gaps_does_not_lengthen_the_period(pipeline, grain):
    costs, m, transfers = pipeline
    samples = 96
    gaps = fit_gaps(costs, samples, m, transfers, grain)
    rounding = sum(2 * 0.05 * grain * sum(cost) for cost in costs)
    period = pass_times(costs, samples, m, transfers).period
    simulated = Simulated(costs, samples, m, transfers, gaps)
    assert max(simulated.periods) <= period + rounding + 1e-6 * period


@given(pipelines())
def test_the_gaps_are_filled_but_for_less_than_a_grain(pipeline):
    costs, m, transfers = pipeline
    samples, grain, rounding = 960, 2, 0.05
    times = pass_times(costs, samples, m, transfers)
    for k, gaps in enumerate(fit_gaps(costs, samples, m, transfers, grain)):
        room = [gap / (LOCAL_COST * sum(costs[k])) for gap in (times.middle[k], times.turn[k])]
        full = sum(gaps) == 2 * samples
        for fits, share in zip(room, gaps, strict=True):
            assert share <= fits + rounding * grain + 1e-6
            assert full or share > fits - (1 - rounding) * grain - 1e-6


@given(pipelines(), st.integers(1, 40), st.integers(1, 200))
@example(([Cost(0.1, 0.1), Cost(5.0, 10.0)], 1, []), 16, 5)
def test_the_fit_is_a_multiple_of_the_grain_and_the_same_every_time(pipeline, grain, samples):
    costs, m, transfers = pipeline
    gaps = fit_gaps(costs, samples, m, transfers, grain)
    assert gaps == fit_gaps(list(costs), samples, m, list(transfers), grain)
    assert len(gaps) == len(costs)
    for gap in gaps:
        assert all(share >= 0 and share % grain == 0 for share in gap)
        assert sum(gap) <= 2 * samples


def test_a_gap_is_measured_in_the_samples_of_its_own_block():
    costs = [Cost(1.0, 2.0), Cost(2.0, 4.0)]
    # the second block works 32 x 6 of the pass; the first, 32 x 1 before it and 32 x 2 after it
    assert pass_times(costs, 32, 1) == PassTimes(288.0, [192.0, 0.0], [0.0, 96.0])
    # a local step on a sample takes a quarter more than its two passes
    assert fit_gaps(costs, 32, 1) == [Gaps(48, 0), Gaps(0, 8)]
