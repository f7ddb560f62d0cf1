"""Windows that follow residual and learning rate: the rule, and what holds for all probes."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hybrid.rounds.controller import HOLD, Controller, powers

LIMIT = 0.1
probes = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.04, 0.05, 0.07, 0.11, 3.0, float("inf"), float("nan")]),
        st.sampled_from([0.0, 1e-3, 0.01, 0.05, 0.1]),
    ),
    max_size=60,
)
controllers = st.builds(
    Controller, st.integers(1, 70), st.integers(1, 5), st.integers(0, 5), st.just(LIMIT)
)


def moves(controller, seen):
    """Rungs after every probe, the one before them first."""
    levels = [controller.level]
    for residual, rate in seen:
        controller.probe(residual, rate)
        levels.append(controller.level)
    return levels


def windows(controller, seen):
    moves(controller, seen)
    return controller.now.window


def test_the_ladder_goes_by_factors_of_two_through_windows_then_sweeps_then_corrections():
    rungs = [(r.window, r.sweeps, r.correct_every) for r in Controller(9, 2, 4).ladder]
    assert rungs == [
        *((1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1)),
        *((8, 2, 1), (8, 2, 2), (8, 2, 4)),
    ]
    assert {r.correct_every for r in Controller(9, 2, 0).ladder} == {0}
    assert powers(1) == [1]


def test_the_aim_is_the_window_that_grows_as_the_rate_falls():
    controller = Controller(64)
    controller.probe(0.0, 0.1)
    found = [controller.ladder[controller.aim(0.1 / n)].window for n in (1, 2, 3, 4, 6, 16, 99)]
    assert found == [4, 8, 16, 16, 32, 64, 64]


def test_a_window_grows_after_two_probes_at_a_smaller_rate_and_shrinks_where_it_rises_again():
    controller = Controller(64)
    assert moves(controller, [(0, 0.1), (0, 0.05), (0, 0.05), (0, 0.05)])[-1] == 3
    assert controller.now.window == 8
    assert windows(controller, [(0, 0.1)] * 2) == 4


def test_a_large_residual_shrinks_the_window_and_is_not_tried_again_at_once():
    controller = Controller(64)
    assert windows(controller, [(0.2, 0.1)] * 2) == 2
    assert windows(controller, [(0.0, 0.1)] * (HOLD + 1)) == 2
    assert windows(controller, [(0.0, 0.1)]) == 4


def test_a_method_that_wants_several_sweeps_has_them_on_every_rung():
    assert {rung.sweeps for rung in Controller(8, 2, least_sweeps=2).ladder} == {2}
    assert [rung.sweeps for rung in Controller(2, 8, least_sweeps=2).ladder] == [2, 2, 4, 8]
    assert {rung.sweeps for rung in Controller(8, 1, least_sweeps=2).ladder} == {1}


def test_between_half_the_limit_and_the_limit_nothing_changes():
    controller = Controller(64)
    assert windows(controller, [(0.0, 0.1), *[(0.07, 0.01)] * 20]) == 4


def test_on_the_lowest_rung_a_residual_that_stays_too_large_asks_for_a_rest():
    found = [Controller(1).probe(0.2, 0.1)]
    controller = Controller(1)
    found = [controller.probe(0.2, 0.1) for _ in range(4)]
    assert found == [False, True, False, True]
    uncorrected = Controller(1, 1, 0)
    assert not any(uncorrected.probe(0.2, 0.1) for _ in range(4))


@given(controllers, probes)
def test_it_moves_by_one_rung_within_the_ladder_and_never_twice_in_two_probes(controller, seen):
    levels = moves(controller, seen)
    assert all(0 <= level < len(controller.ladder) for level in levels)
    steps = [after - before for before, after in pairwise(levels)]
    assert {*steps} <= {-1, 0, 1}
    assert not any(one and next_ for one, next_ in pairwise(steps))


@given(controllers, probes)
def test_it_goes_up_only_after_two_small_residuals_with_none_too_large_before(controller, seen):
    levels = moves(controller, seen)
    for i, (before, after) in enumerate(pairwise(levels)):
        if after > before:
            assert all(residual <= LIMIT / 2 for residual, _ in seen[i - 1 : i + 1])
            assert not any(residual > LIMIT for residual, _ in seen[max(0, i - HOLD) : i])


@given(controllers, probes, st.integers(0, 60))
def test_what_a_checkpoint_keeps_decides_as_if_it_had_gone_on(controller, seen, at):
    other = Controller(1)
    other.ladder, other.start = controller.ladder, controller.start
    moves(controller, seen[:at])
    other.load_state(json.loads(json.dumps(controller.state())))
    assert moves(other, seen[at:]) == moves(controller, seen[at:])


def test_a_state_of_a_longer_ladder_is_taken_back_within_this_one():
    longer = Controller(64)
    moves(longer, [(0.0, 0.1), *[(0.0, 1e-3)] * 20])
    shorter = Controller(8)
    shorter.load_state(longer.state())
    assert (longer.now.window, shorter.now.window) == (64, 8)
