"""What units cost: counted or measured, with the model left as it was."""

from copy import deepcopy

import pytest
import torch
from small_networks import UNet
from torch import nn

from hybrid import split
from hybrid.networks.blocks import laid_out
from hybrid.networks.costs import count_costs, count_operations, measure_costs, weigh
from hybrid.networks.units import units


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 25, 3),
    ).train()


def counted(samples=8):
    model = network()
    return count_costs(model, units(model), torch.randn(samples, 2, 5, 5))


def test_costs_of_a_batch_are_those_of_passes_over_all_of_it():
    x = torch.randn(9, 2, 5, 5)
    for i, (unit, cost) in enumerate(zip(network(), counted(9), strict=True)):
        passes = count_operations(unit, x, i > 0)
        if i != 1:  # BatchNorm, whose statistics are kept as they are
            assert [weigh(each) / 9 for each in passes] == pytest.approx([*cost], rel=1e-12)
        x = unit(x)


def test_costs_are_of_one_sample():
    for small, large in zip(counted(8), counted(64), strict=True):
        # what a batch reads once, the weights, weighs less in a larger one
        assert 0.4 * sum(small) < sum(large) <= sum(small)


@pytest.mark.parametrize("measure", [count_costs, measure_costs])
def test_the_model_is_left_as_it_was(measure):
    model = network()
    model(torch.randn(4, 2, 5, 5)).sum().backward()
    model[4].weight.grad = None
    model[2].eval()
    tensors = deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    measure(model, units(model), torch.randn(8, 2, 5, 5))
    assert all(torch.equal(tensors[name], now) for name, now in model.state_dict().items())
    for p, before in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (before is None)
        assert before is None or torch.equal(p.grad, before)
    assert model[1].track_running_stats
    assert [module.training for module in model.modules()] == [True] * 3 + [False] + [True] * 2


def test_what_crosses_no_cut_costs_no_packing():
    x = laid_out(torch.zeros(4, 1, 8, 8))
    network = UNet(3)
    # its skips go from unit to unit, and the cut is where one tensor is alive
    blocks = split(network, cuts=["head"], sample=x)
    found = sum(map(sum, blocks.count_costs(x)))
    assert found == pytest.approx(
        sum(map(weigh, count_operations(network, x, False))) / 4, rel=0.05
    )
