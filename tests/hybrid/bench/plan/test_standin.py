"""Plans on stand-ins: what the clock of a schedule must say where every unit takes as long."""

import pytest
import torch

from hybrid.bench.recipes import Recipe
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.settings.config import RoundSettings
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay
from tests.hybrid.bench.plan import planners
from tests.hybrid.bench.plan.planners import BACKWARD, FORWARD, planner


def rate(solver, blocks=5, network=None, **rounds):
    """Images a second over those of one rank that does nothing but passes."""
    made = planner(network)
    recipe = Recipe("asked", solver, rounds=RoundSettings(**rounds))
    found = made.predict(made.blocks(blocks, 32), recipe)
    return found.images_per_second * 5 * (FORWARD + BACKWARD)


@pytest.mark.parametrize("m", [1, 4])
def test_a_flushed_pipeline_idles_for_its_bubble_and_delayed_gradients_have_none(m):
    K = 5
    assert rate(Backprop(micro_batches=m)) == pytest.approx(K * m / (m + K - 1), rel=0.03)
    for solver in (DDG(micro_batches=m), FDG(micro_batches=m)):
        assert rate(solver) == pytest.approx(K, rel=0.03)
    # the blocks but the last go forward twice
    slower = (FORWARD + BACKWARD) / (2 * FORWARD + BACKWARD)
    assert rate(FeaturesReplay(micro_batches=m)) == pytest.approx(K * slower, rel=0.03)


@pytest.mark.parametrize(("cuts", "peak"), [((), 4), (("layer2.0",), 3 / 0.5)])
def test_a_tick_lasts_as_long_as_its_slowest_block(cuts, peak):
    """Of five units, four go to the machine of speed 1 unless cuts give it two."""
    made = planner(**{"split.speeds": [1, 0.5]})
    for solver in (DDG(micro_batches=4), FDG(micro_batches=4)):
        found = made.predict(made.blocks(2, 32, cuts), Recipe("asked", solver))
        tick = peak * (FORWARD + BACKWARD)
        assert found.images_per_second == pytest.approx(1 / tick, rel=0.1)


def test_an_undivided_network_is_on_the_fastest_machine_and_its_replicas_as_slow_as_the_slowest():
    made = planner(**{"split.speeds": [0.5, 2]})
    (alone,) = made.on_one_rank(())
    recipe = Recipe("asked", Backprop())
    both = made.predict(made.blocks(1), recipe, replicas=2)
    a_sample = 5 * (FORWARD + BACKWARD)
    assert alone.images_per_second == pytest.approx(2 / a_sample, rel=0.1)
    assert both.images_per_second == pytest.approx(2 * 0.5 / a_sample, rel=0.1)


def test_cuts_follow_the_memory_that_a_recipe_needs(monkeypatch):
    monkeypatch.setattr(planners.plan, "process_bytes", lambda model: 0)  # of libraries
    recipe = Recipe("asked", Backprop())
    free = planner()
    halves = free.blocks(2, 32)
    needs = free.memory(halves, recipe)
    made = planner(**{"split.memory": [0.9 * needs[0] / 1e9, 1]})
    (found,) = (p for p in made.predictions([Grid(2)], [2]) if p.recipe.name == "backprop, m=1")
    assert found.memory_bytes[0] <= 0.9 * needs[0]
    assert found.cuts != halves.cuts
    cut = made.predictions([Grid(2)], [2], halves.cuts)
    assert "backprop, m=1 on 2 blocks needs" in (list(cut) and made.refused[0])


def test_one_forward_one_backward_waits_for_slow_messages_and_twice_the_delay_does_not():
    """P = f + b + 2 t (K-1) / K against f + b, a tick's message taking t < (f + b) / 2."""
    made = planner()
    shapes = made.blocks(5, 32).cut_shapes(torch.zeros(1, *made.model.input_shape))
    largest = max(shape.numel() for shape in map(torch.Size, shapes))
    tick = 8 * (FORWARD + BACKWARD)
    network = LinkSpeed(8 * 4 * largest / (0.3 * tick))
    waiting, slack = (rate(kind(micro_batches=4), network=network) for kind in (DDG, FDG))
    assert slack == pytest.approx(5, rel=0.03)
    assert 5 / (1 + 0.6) < waiting < 5 / (1 + 0.1)
