"""The shortest tick of all cuts by its closed form, and cuts inside units where that pays."""

from itertools import accumulate, combinations, pairwise

import pytest
import torch
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybrid import split
from hybrid.networks import models
from hybrid.networks.partition.balance import Messages, shortest_tick
from hybrid.solvers.layers.branches import Reversible, Skippable
from hybrid.solvers.local_work.budget import Cost, Pipeline


@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=8), data=st.data())
def test_the_tick_of_the_cuts_is_the_shortest_of_all(costs, data):
    blocks = data.draw(st.integers(1, len(costs)))
    hops = data.draw(st.integers(1, 3))
    count = len(costs)
    messages = data.draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=blocks, max_size=blocks))
    sums = [0, *accumulate(costs)]

    def seconds(k, start, end):
        return (sums[end] - sums[start]) / speeds[k]

    def tick(starts):
        """T as `Pipeline` states it."""
        passes = [Cost(seconds(k, *run), 0.0) for k, run in enumerate(pairwise([*starts, count]))]
        times = [messages[start] for start in starts[1:]]
        return Pipeline(
            passes, [hops * (blocks - 1 - k) for k in range(blocks)], 1, times, times
        ).tick()

    every = [[0, *rest] for rest in combinations(range(1, count), blocks - 1)]
    found = shortest_tick(count, blocks, seconds, messages, hops)
    assert tick(found) == pytest.approx(min(map(tick, every)), rel=1e-6)


def test_a_large_message_moves_a_cut():
    """Where a byte takes a second, the cut lies where the fewest cross."""

    def layer(inner, width):
        return nn.Sequential(nn.Linear(4, inner), nn.ReLU(), nn.Linear(inner, width))

    wide = nn.Sequential(layer(64, 64), nn.Linear(64, 4), layer(64, 4), layer(64, 4))
    sample = torch.zeros(64, 4)
    blocks = split(wide, 2, sample=sample, inside=False, balance="measured", messages=Messages(1.0))
    crossing = blocks.crossing_bytes(sample)
    assert crossing[blocks.starts[1]] == min(crossing[1:]) < max(crossing[1:])


def resnet(depth=8):
    torch.manual_seed(0)
    return models.resnet(depth, classes=5, channels=1, image_size=8)


def test_blocks_that_units_make_uneven_are_cut_inside_of_them():
    whole, inside = (split(resnet(), 4, inside=inside) for inside in (False, True))
    largest = []
    for blocks in (whole, inside):
        costs, runs = [*map(sum, blocks.costs)], pairwise([*blocks.starts, len(blocks.units)])
        largest.append(max(sum(costs[a:b]) for a, b in runs) / sum(costs))
    assert all(name.count(".") == 1 for name in whole.cuts)
    assert any(name.count(".") == 2 for name in inside.cuts)
    assert largest[1] < 0.9 * largest[0]


def test_more_blocks_than_units_are_cut_inside_of_them_and_hold_every_tensor_once():
    model = resnet()
    blocks = split(model, 9)
    names = [name for unit in blocks.units for name in unit.tensors()]
    assert sorted(names) == sorted(model.state_dict())
    modules = [blocks.module(k) for k in range(9)]
    assert sum(len([*m.parameters()]) for m in modules) == len([*model.parameters()])
    known = {m.global_name(name) for m in modules for name, _ in m.named_parameters()}
    assert known == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        (["layer1.0.conv3"], "there is no cut before 'layer1.0.conv3' in BasicBlock"),
        (["layer2.0.conv2", "layer1.0.conv2"], "are not in the model's order"),
        (["stem.conv1"], "no unit 'stem.conv1'"),
    ],
)
def test_a_cut_inside_a_unit_that_cannot_be_is_refused(cuts, said):
    assert said in refusal(split, resnet(), cuts=cuts)


def opened(blocks):
    """The units that are cut inside."""
    return {cut.rpartition(".")[0] for cut in blocks.cuts if cut.count(".") > 1}


def test_units_that_may_be_left_out_or_reversed_stay_whole():
    model = models.stochastic_depth(resnet(14), 0.5)
    may_be_left_out = {
        name for name, m in model.named_modules() if isinstance(m, Skippable) and m.survival < 1
    }
    assert len(may_be_left_out) > 3
    assert not opened(split(model, 5, inside=True)) & may_be_left_out
    reversible = models.revnet(depth=18, classes=5, channels=1, image_size=8)
    kinds = dict(reversible.named_modules())
    assert not any(
        isinstance(kinds[name], Reversible) for name in opened(split(reversible, 8, inside=True))
    )
