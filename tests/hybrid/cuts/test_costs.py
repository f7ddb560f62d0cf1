"""What units cost: counted or measured, with the model left as it was."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from hybrid.cuts.costs import operations, seconds, unit_costs
from hybrid.models import units
from solvers.passes.pipeline import Cost

MEASURES = pytest.mark.parametrize("measure", [operations, seconds])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 25, 3),
    ).train()


def counted(samples: int = 8) -> list[Cost]:
    model = network()
    return unit_costs(model, units(model), torch.randn(samples, 2, 5, 5), operations)


def test_a_linear_layer_costs_its_operations_and_four_for_every_byte_it_moves():
    layer, x = nn.Linear(7, 5, bias=False), torch.randn(3, 7)
    product = 2 * 3 * 7 * 5 + 4 * 4 * (3 * 7 + 7 * 5 + 3 * 5)
    (forward, without), (_, with_input) = (operations(layer, x, needed) for needed in (False, True))
    assert forward == product
    assert product <= with_input - without < 3 * product


def test_costs_are_of_one_sample():
    for small, large in zip(counted(8), counted(64), strict=True):
        # what a batch reads once, the weights, weighs less in a larger one
        assert 0.4 * sum(small) < sum(large) <= sum(small)


@MEASURES
def test_every_unit_with_work_costs_something_forward_and_backward(measure):
    model = network()
    costs = unit_costs(model, units(model), torch.randn(8, 2, 5, 5), measure)
    assert all(cost.backward > 0 for cost in costs)
    assert all(cost.forward > 0 for number, cost in enumerate(costs) if number != 3)


@MEASURES
def test_the_model_is_left_as_it_was(measure):
    model = network()
    model(torch.randn(4, 2, 5, 5)).sum().backward()
    model[4].weight.grad = None
    tensors = deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    unit_costs(model, units(model), torch.randn(8, 2, 5, 5), measure)
    assert all(torch.equal(tensors[name], now) for name, now in model.state_dict().items())
    for p, before in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (before is None)
        assert before is None or torch.equal(p.grad, before)
    assert model[1].track_running_stats
    assert model.training
