"""The timetable of a delayed pipeline: what a tick takes, who waits, and what fits there."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.solvers.local_work.budget import (
    LOCAL_COST,
    MARGIN,
    Cost,
    LocalBudget,
    Measured,
    Pipeline,
    fit_local_work,
)


@st.composite
def pipelines(draw):
    """Uneven costs of 1 to 6 blocks, in the order of ddg or of fdg, and messages between them."""
    K, hops = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    cost = st.builds(Cost, st.floats(0.01, 0.1), st.floats(0.01, 0.2))
    costs = draw(st.lists(cost, min_size=K, max_size=K))
    transfers = draw(st.lists(st.floats(0.0, 8.0), min_size=K - 1, max_size=K - 1))
    delays = [hops * (K - 1 - k) for k in range(K)]
    replays = draw(st.booleans())
    packing = draw(st.lists(st.floats(0.0, 1.0), min_size=K, max_size=K))
    messages = [each + draw(st.floats(0.0, 2.0)) for each in transfers]
    shares = draw(st.lists(st.floats(0.0, 0.5), min_size=K, max_size=K))
    fixed = [share * 16 * sum(cost) for share, cost in zip(shares, costs, strict=True)]
    return Pipeline(costs, delays, 16, messages, transfers, packing, replays, fixed)


def local_seconds(p, k, samples):
    """Of local work on so many samples, which has a part that none of them adds to."""
    a_sample = sum(p.costs[k]) - p.fixed[k] / p.samples
    return LOCAL_COST * (p.fixed[k] + samples * a_sample) if samples else 0.0


def simulated(pipeline, waits, ticks=400):
    """Time of a tick of ranks that take their passes in order, each as soon as it can.

    A cut carries one message at a time in each direction.
    """
    p, K = pipeline, len(pipeline.costs)
    free, up, down = [0.0] * K, [0.0] * K, [0.0] * K
    activations, adjoints = ([[0.0] * ticks for _ in range(K)] for _ in range(2))
    ends = []
    for t in range(ticks):
        for k, (cost, local) in enumerate(zip(p.costs, waits, strict=True)):
            local_ = [local_seconds(p, k, samples) for samples in local]
            free[k] = max(free[k], activations[k][t])
            free[k] += p.samples * cost.forward + p.packing[k] / 2
            if k < K - 1:
                up[k] = max(up[k], free[k]) + p.occupied[k]
                activations[k + 1][t] = up[k] + p.messages[k] - p.occupied[k]
            i = t - p.delays[k]
            if i >= 0:
                free[k] = max(free[k] + local_[0], adjoints[k][i])
                again = cost.forward if p.replays and k < K - 1 else 0.0
                free[k] += p.samples * (cost.backward + again) + p.packing[k] / 2
                if k:
                    down[k] = max(down[k], free[k]) + p.occupied[k - 1]
                    adjoints[k - 1][i] = down[k] + p.messages[k - 1] - p.occupied[k - 1]
                free[k] += local_[1]
        ends.append(free[0])
    return (ends[-1] - ends[ticks // 2]) / (ticks - 1 - ticks // 2)


@given(pipelines())
def test_a_tick_takes_what_a_simulation_of_the_ranks_takes(pipeline):
    alone = [LocalBudget()] * len(pipeline.costs)
    assert simulated(pipeline, alone) == pytest.approx(pipeline.tick(), rel=0.01)


@given(pipelines(), st.integers(1, 4))
def test_local_work_that_fits_makes_no_tick_longer(pipeline, grain):
    longest = 1.005 * simulated(pipeline, [LocalBudget()] * len(pipeline.costs))
    assert simulated(pipeline, pipeline.fit(grain)) <= longest


@given(pipelines(), st.integers(1, 4))
def test_the_waits_are_filled_but_for_less_than_a_grain(pipeline, grain):
    n, T = pipeline.samples, pipeline.tick()
    fitted = pipeline.fit(grain)
    assert fitted == pipeline.fit(grain)
    passes = map(sum, zip(*pipeline.passes(), strict=True))
    blocks = zip(pipeline.costs, pipeline.fixed, passes, pipeline.idle(), fitted, strict=True)
    for cost, once, busy, idle, local in blocks:
        assert sum(idle) == pytest.approx(T - busy, abs=1e-9 * T)
        assert all(samples % grain == 0 for samples in local)
        assert sum(local) <= n
        a_sample = sum(cost) - once / n
        fitting = [max(0.0, MARGIN * time / LOCAL_COST - once) / a_sample for time in idle]
        if not any(local):
            assert sum(fitting) < n / 2 + 2 * grain
            continue
        assert sum(local) >= n / 2
        for fits, samples in zip(fitting, local, strict=True):
            assert samples <= fits + 1e-6
            assert sum(local) == n // grain * grain or samples > fits - grain - 1e-6


@given(
    st.integers(1, 40),
    st.sampled_from([(Cost(1.0, 2.0), Cost(2.0, 4.0)), (Cost(1.0, 2.0),) * 2, (Cost(1.0, 1.0),)]),
)
@example(1, (Cost(1.0, 2.0), Cost(2.0, 4.0)))
def test_short_messages_give_the_timetable_of_none(samples, costs):
    delays = [len(costs) - 1 - k for k in range(len(costs))]
    counted = fit_local_work(costs, delays, samples)
    none = [0.0] * len(costs)
    short = Measured([1.0] * len(costs), none, none, *[[0.01] * (len(costs) - 1)] * 2)
    assert fit_local_work(costs, delays, samples, False, short) == counted
    if len(costs) > 1 and samples >= 4:
        long = Measured([1.0] * len(costs), none, none, *[[9.0] * (len(costs) - 1)] * 2)
        whole = samples // max(2, samples // 4) * max(2, samples // 4)
        assert [sum(each) for each in fit_local_work(costs, delays, samples, False, long)] == [
            whole
        ] * 2


def test_even_blocks_without_messages_never_wait():
    assert Pipeline([Cost(1.0, 2.0)] * 4, [3, 2, 1, 0], 16).fit() == [LocalBudget()] * 4
