"""What a plan says of times that drift, of gains that cannot be, and where one rank wins."""

import pytest

from hybrid.bench.plan import advice, timed_network
from hybrid.bench.plan.prediction import Prediction
from hybrid.bench.recipes import Recipe
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.solvers import DDG
from hybrid.solvers.local_work.budget import Cost
from tests.hybrid.bench.plan.planners import planner


@pytest.fixture
def unmeasured(monkeypatch):
    """A planner, and what makes its machine slower from then on."""
    made, machine = planner(), {"slower": 1.0}
    del made.timed.measure

    def measured(model, units, rows):
        seconds = machine["slower"]
        return [[Cost(seconds * (1 + 1 / len(x)), 2 * seconds)] * len(units) for x in rows]

    monkeypatch.setattr(timed_network, "measure_passes", measured)
    return made, machine


def test_a_machine_that_slows_down_between_measurements_changes_no_ratio(unmeasured):
    made, machine = unmeasured
    blocks = made.timed.blocks(1, 32)
    for samples, machine["slower"] in ((16, 3.0), (8, 0.5), (4, 7.0)):
        (first, *_) = made.timed.costs(blocks, samples)
        assert first == pytest.approx((1 + 1 / samples, 2))


def predicted(ranks, rate, speed_up):
    recipe = Recipe("ddg, m=4", DDG(micro_batches=4))
    shares = [0.0] * ranks
    return Prediction(Grid(ranks), recipe, [], rate, 0.0, shares, 0.0, [0], 32, speed_up=speed_up)


@pytest.mark.parametrize(("speed_up", "said"), [(2.38, True), (2.004, False), (1.9, False)])
def test_a_gain_of_more_than_the_ranks_is_named_as_one_that_cannot_be(speed_up, said):
    row = advice.row(predicted(2, 100 * speed_up, speed_up), 1000, 100.0)
    assert (f"| {speed_up:.2f}, cannot be |" in row) == said
    lines = list(advice.impossible_predictions([predicted(2, 100 * speed_up, speed_up)]))
    assert len(lines) == said
    assert all("ddg, m=4 on 2 ranks is predicted to be 2.38 times" in line for line in lines)


def test_speed_ups_are_over_the_faster_of_the_plain_and_the_accumulating_loop():
    """Here it is the second: passes over fewer samples are measured to take less."""
    made = planner(faster=[8])
    alone = made.on_one_rank([4])
    assert [p.recipe.name for p in alone] == ["plain loop, accumulating over 4", "plain loop"]
    assert [p.speed_up for p in alone] == pytest.approx([1.0, 0.5], rel=0.03)
    for p in made.predictions([Grid(2)], [4]):
        rate = p.images_per_second / alone[0].images_per_second
        assert p.speed_up == pytest.approx(rate)
        assert not p.impossible


SLOW = LinkSpeed(bytes_per_second=1e3)


def test_one_rank_or_the_undivided_network_is_recommended_where_it_is_faster():
    made = planner(SLOW)
    found, alone = list(made.predictions([Grid(2)], [4])), made.on_one_rank([4])
    said = advice.advice(found, alone[:1], made.settings).splitlines()
    assert said[0].startswith("stay on one rank: plain loop")
    assert said[1].startswith("hybrid train --blocks 1 --model resnet8")
    assert said[-1].startswith("mpirun -n 2 hybrid train")
    fast = planner()
    found, alone = list(fast.predictions([Grid(2)], [4])), fast.on_one_rank([4])
    (whole,) = fast.predictions([Grid(1, 2)], [4])
    said = advice.advice(found, [alone[0], whole], fast.settings).splitlines()
    assert said[0].startswith("do not cut the network: backprop, m=1 on 2 replicas is ")
    assert said[1].startswith("mpirun -n 2 hybrid train")
    assert "--blocks 1 --replicas 2" in said[1]
