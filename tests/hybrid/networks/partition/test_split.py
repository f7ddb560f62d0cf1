"""Units into blocks: the best split, the user's split, and a model left as it was."""

from collections import OrderedDict
from functools import partial
from itertools import combinations, pairwise
from math import nan
from operator import le

import pytest
import torch
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybrid import split
from hybrid.networks import models
from hybrid.networks.blocks import Blocks
from hybrid.networks.costs import OPERATIONS_A_BYTE
from hybrid.networks.partition.balance import Machines
from hybrid.networks.partition.split import BALANCES
from hybrid.networks.units import units


def resnet(depth=14):
    torch.manual_seed(0)
    return models.resnet(depth=depth, classes=5, channels=1, image_size=8)


class Loop(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def peak_and_squares(costs, starts):
    runs = [sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)])]
    return max(runs), sum(run**2 for run in runs)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_balanced_starts_are_the_best_of_all(costs, data):
    blocks = data.draw(st.integers(1, len(costs)))
    every = [[0, *rest] for rest in combinations(range(1, len(costs)), blocks - 1)]
    best = min(every, key=lambda starts: (*peak_and_squares(costs, starts), starts))
    alike = Machines([1.0] * blocks)
    assert alike.starts(costs, partial(Blocks, nn.Sequential(), [])) == best


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=7), data=st.data())
def test_starts_follow_the_speeds_and_the_memory_of_machines(costs, data):
    """Compared with all cuts. What a unit needs has nothing to do with what it costs."""
    blocks = data.draw(st.integers(1, len(costs)))

    def draw(least, most, count):
        return data.draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    speeds = [1 / 2**n for n in draw(0, 3, blocks)]
    needs, memory = draw(0, 9, len(costs)), draw(1, 25, blocks)
    model = nn.Sequential(*(nn.Identity() for _ in costs))
    make = partial(Blocks, model, units(model))

    def runs(of, starts):
        return [sum(of[a:b]) for a, b in pairwise([*starts, len(of)])]

    def score(starts):
        seconds = [c / speed for c, speed in zip(runs(costs, starts), speeds, strict=True)]
        return max(seconds), sum(s**2 for s in seconds), starts

    every = [[0, *rest] for rest in combinations(range(1, len(costs)), blocks - 1)]
    fit = [s for s in every if all(map(le, runs(needs, s), memory))]
    machines = Machines(speeds, memory, lambda made: [1e9 * x for x in runs(needs, made.starts)])
    if fit:
        assert machines.starts(costs, make) == min(fit, key=score)
    else:
        assert "no cut leaves room" in refusal(machines.starts, costs, make)


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [1, 0], [1, -1], [1, nan], [1, "2"], 1, "12"])
@pytest.mark.parametrize("name", ["speeds", "memory"])
def test_each_machine_has_a_positive_number(name, numbers):
    said = refusal(split, resnet(), 2, **{name: numbers})
    assert said.startswith(f"{name} is {numbers!r}; it must have a number from 1e-6 to 1e6 for")


@pytest.mark.parametrize("name", ["speeds", "memory"])
def test_cuts_and_machines_are_two_ways_to_cut(name):
    said = refusal(split, resnet(), 2, cuts=["head"], **{name: [1, 2]})
    assert said == f"cuts and {name} both settle the blocks: leave one of the two out"


@pytest.mark.parametrize("network", ["chain", "calls"])
def test_a_slow_machine_gets_less_and_the_first_unit_without_room_is_named(network):
    layers = [nn.Linear(8, 8) for _ in range(6)]
    model = nn.Sequential(*layers) if network == "chain" else Loop(layers)
    sample = torch.randn(4, 8)
    for speeds, cut in (([1, 1], 3), ([2, 1], 4), ([1, 5], 1)):
        assert split(model, 2, sample=sample, speeds=speeds).starts == [0, cut]
    limited = split(model, 2, sample=sample, memory=[24, 12])
    assert limited.starts == [0, 3]
    assert limited.recut(lambda made: [6e9 * (made.starts[1]), 0]).starts == [0, 3]
    assert limited.recut(lambda made: [13e9 * (made.starts[1]), 0]).starts == [0, 1]
    assert limited.recut(lambda made: [0, 4e9 * (6 - made.starts[1])]).starts == [0, 3]
    assert limited.recut(lambda made: [0, 5e9 * (6 - made.starts[1])]).starts == [0, 4]
    said = refusal(limited.recut, lambda made: [0, 13.2e9 * (6 - made.starts[1])])
    last = limited.units[-1].name
    assert f"block 1 needs 13.2 GB for unit {last!r}, and its machine's memory has 12: take" in said


def test_operations_are_those_of_the_convolutions_and_of_the_bytes_they_move():
    first, second = (nn.Conv2d(*c, 3, padding=1, bias=False) for c in ((2, 3), (3, 2)))
    model = nn.Sequential(first, nn.ReLU(), second).to(memory_format=torch.channels_last)
    costs = split(model, 2, balance="operations", sample=torch.randn(4, 2, 6, 6)).costs
    narrow, wide, weight = 2 * 36, 3 * 36, 3 * 2 * 9 / 4
    arithmetic, value = 2 * 3 * 2 * 9 * 36, 4 * OPERATIONS_A_BYTE
    assert [cost.forward for cost in costs] == [
        arithmetic + value * (narrow + wide + weight),
        value * (wide + wide),
        arithmetic + value * (wide + narrow + weight),
    ]
    # the first needs no gradient of its input
    least = [
        arithmetic + value * (wide + narrow + 2 * weight),
        value * 3 * wide,
        2 * arithmetic + value * (narrow + 2 * wide + 2 * weight),
    ]
    for cost, bound in zip(costs, least, strict=True):
        assert bound <= cost.backward < bound + arithmetic


PLAIN = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
BODY = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
USERS = nn.Sequential(OrderedDict(stem=nn.Linear(3, 4), body=BODY, head=nn.Linear(4, 2)))
CUTS = {
    "body.2": r"^no unit 'body.2' among the 5 units \(stem, .*\); did you mean 'body.0'\?",
    "q": r"^no unit 'q' among the 5 units \(stem, body.0, .*\)$",
    "stem": r"^a cut before 'stem', the first unit, would leave block 0 empty",
    "head body.0": r"cuts \['head', 'body.0'\] are not in the model's order: stem, body.0",
    "head head": r"cuts \['head', 'head'\] are not in the model's order",
}


@pytest.mark.parametrize(
    ("model", "blocks", "settings", "message"),
    [
        *((resnet(), n, {}, rf"^{n} blocks asked: ask for 1 or more") for n in (0, -1)),
        (resnet(), 99, {}, r"^99 blocks asked of 26 units \(stem, .*1 to 26"),
        (resnet(), 9, {"inside": False}, r"^9 blocks asked of 8 units \(stem, .*1 to 8"),
        (resnet(), None, {}, "needs a number of blocks, or cuts"),
        (resnet(), 2, {"balance": "fair"}, "balance is 'fair'; choose one of operations, measured"),
        (PLAIN, 2, {}, r"^costs need sample=.*or give cuts=, or balance='even'"),
        *((USERS, None, {"cuts": cuts.split()}, said) for cuts, said in CUTS.items()),
    ],
)
def test_a_split_that_cannot_be_is_refused(model, blocks, settings, message):
    with pytest.raises(ValueError, match=message):
        split(model, blocks, **settings)


def test_a_users_model_is_cut_before_the_units_they_name():
    blocks = split(USERS, cuts=["body.1.0", "head"])
    assert [[unit.name for unit in blocks.units_of(k)] for k in range(3)] == [
        ["stem", "body.0"],
        ["body.1.0", "body.1.1"],
        ["head"],
    ]
    assert blocks.cuts == ["body.1.0", "head"]


def test_even_blocks_are_even_in_units_along_a_graph_too():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x):
            before = x
            for layer in self.layers:
                before, x = x, layer(x) + before
            return x

    blocks = split(Skips(), 4, balance="even", sample=torch.zeros(2, 4))
    assert [len(blocks.units_of(k)) for k in range(4)] == [2, 2, 2, 2]


def test_blocks_share_their_tensors_with_the_model_under_its_names():
    model = resnet()
    blocks = split(model, 3, balance="even")
    tensors = {
        module.global_name(name): tensor
        for k in range(3)
        for module in [blocks.module(k)]
        for name, tensor in module.state_dict().items()
    }
    whole = model.state_dict()
    assert list(tensors) == list(whole)
    assert all(tensors[name].data_ptr() == whole[name].data_ptr() for name in whole)


def test_inputs_that_do_not_fit_the_model_are_refused_with_the_unit():
    blocks = split(resnet(8), cuts=["layer2.0"])
    said = r"^inputs of shape \(3, 8, 8\) do not fit the model: unit stem says: .+$"
    with pytest.raises(ValueError, match=said):
        blocks.with_bundles(torch.zeros(2, 3, 8, 8))


def test_weights_of_two_blocks_are_refused_and_may_be_tied_within_one():
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    for model in (nn.Sequential(first, last), nn.Sequential(first, first)):
        with pytest.raises(
            ValueError, match=r"^blocks 0 and 1 share the parameter '1.weight'.*own$"
        ):
            split(model, cuts=["1"])
        assert len(split(model, 1)) == 1


def test_a_module_that_works_in_place_stays_with_the_one_before_it():
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), nn.ReLU(inplace=True))
    for balance in BALANCES:
        assert split(model, 2, balance=balance, sample=torch.randn(8, 4)).cuts == ["2"]
    with pytest.raises(ValueError, match="no unit '1' among the 2 units"):
        split(model, cuts=["1"])


class Last(nn.Module):
    def forward(self, states):
        return states[0][:, -1]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_cuts_keep_out_of_what_has_no_row_for_each_sample(layers):
    """The last states of a recurrent network, (layers, N, H), between its module and the next."""
    recurrent, x = nn.LSTM(4, 8, layers, batch_first=True), torch.ones(5, 3, 4)
    model = nn.Sequential(nn.Linear(4, 4), recurrent, Last(), nn.Linear(8, 2))
    cuts = {1: [], 2: ["1"], 3: ["1", "3"]}
    for count, expected in cuts.items():
        cut = split(model, count, balance="even", sample=x).with_bundles(x)
        assert cut.cuts == expected
        value = cut.pack_inputs(x)
        for index in range(count):
            value = cut.module(index)(value)
        assert torch.equal(value, model(x))
    said = refusal(split(model, cuts=["2"], sample=x).with_bundles, x)
    assert said.startswith("what goes into 2 has shape")


def test_blocks_say_their_units_parameters_and_shares_and_not_the_whole_module():
    blocks = split(models.build("resnet8", 10, 1, 8), 2, inside=False)
    first, second = repr(blocks).splitlines()
    assert first == "block 0: stem to layer1.0, 4,848 parameters, 42% of the cost"
    assert second.startswith("block 1: layer2.0 to head, 70,154 parameters, ")
    assert blocks._repr_html_().startswith(
        "<table><tr><th>block</th><th>units</th><th>parameters</th><th>share of the cost</th></tr>"
        "<tr><td>0</td><td>stem to layer1.0</td><td>4,848</td><td>42%</td></tr>"
    )


def test_blocks_of_explicit_cuts_have_no_share_and_names_are_escaped():
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(2, 2))
    model.add_module("after", nn.Linear(2, 2))
    blocks = split(model, cuts=["after"])
    assert repr(blocks) == (
        "block 0: <b> to <b>, 6 parameters\nblock 1: after to after, 6 parameters"
    )
    assert "<td>&lt;b&gt; to &lt;b&gt;</td><td>6</td></tr>" in blocks._repr_html_()
    assert "share" not in blocks._repr_html_()
