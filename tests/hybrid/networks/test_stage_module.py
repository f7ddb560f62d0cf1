"""Stages run the same whether code without cuts inside is watched or not."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hybrid.networks import models
from hybrid.networks.calls import Calls
from hybrid.networks.stage_module import StageModule
from hybrid.solvers.numerics.attributes import find_closed


class Inside(nn.Module):
    """Calls a chain of residual blocks and keeps the number of its passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.passes, self.chain = 0, models.resnet(8)

    def forward(self, x):
        self.passes += 1
        return self.chain(x)


def test_an_opened_module_with_no_cut_inside_is_one_call_with_the_same_bits():
    model, x = Inside(), torch.randn(3, 3, 8, 8)
    model.chain.layer2[0].relu.register_forward_hook(lambda *_: None)
    cuts = [f"chain.layer{n}.0.conv2" for n in (1, 2, 3)]
    calls = Calls(model, x, cuts)
    blocks = {f"chain.layer{n}.0" for n in (1, 2, 3)}
    assert blocks <= calls.whole.opened
    assert blocks & calls.whole.closed == {"chain.layer1.0", "chain.layer3.0"}
    starts = [0, *map(calls.unit_names.index, cuts), calls.count]
    results, templates = [], []
    for whole in (calls.whole, replace(calls.whole, closed=frozenset())):
        value, results_of_way, number = x, [], 0
        for start, stop in pairwise(starts):
            stage = calls.stage(start, stop, True)
            stage = StageModule(stage.network, whole, stage.start, stage.end, stage.numbers)
            for _ in range(2):  # computes templates, then looks them up
                stage.network.copy.load_state_dict(deepcopy(model.state_dict()), strict=False)
                stage.zero_grad()
                entering = [y.detach().requires_grad_() for y in tree_leaves(value)]
                out = stage(entering[0] if len(entering) == 1 else tuple(entering))
                sum(y.square().sum() for y in tree_leaves(out)).backward()
                results_of_way += [*tree_leaves(out), *(y.grad for y in entering)]
                results_of_way += [p.grad.clone() for p in stage.parameters() if p.grad is not None]
            value = out
            number += sum(map(len, stage.templates.values()))
        results.append(results_of_way)
        templates.append(number)
    assert len(results[0]) == len(results[1]) > 40
    assert all(map(torch.equal, *results))
    assert templates[0] < templates[1]


@pytest.mark.parametrize("way", ["hook", "forward", "function", "class", "inside"])
def test_a_module_that_runs_code_of_the_user_is_watched_where_it_is_opened(way):
    net = nn.ModuleDict({n: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())) for n in "ab"})
    module = net["b"]
    if way == "hook":
        module[0].register_forward_hook(lambda *_: None)
    elif way == "forward":
        module.forward = lambda x: x
    elif way == "function":
        module.activation = lambda x: x
    else:
        mine = type("Mine", (nn.Sequential,), {"__module__": __name__})
        (module[1] if way == "inside" else module).__class__ = mine
    assert find_closed(net, {"", "a", "a.1", "b", "b.1"}) - {"b.1"} == {"a", "a.1"}
