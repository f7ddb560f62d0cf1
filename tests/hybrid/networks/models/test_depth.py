"""Stochastic depth: probabilities, what is left out, and the plain network in tests."""

import pytest
import torch
from answers import refusal
from trainings import assert_same, digits, trained_weights, trainer

from hybrid import split
from hybrid.networks import models
from hybrid.networks.models.residual import BasicBlock, Bottleneck, PreActBlock
from hybrid.settings.config import LinkSettings
from hybrid.solvers import Backprop
from hybrid.solvers.layers.branches import Skippable, nothing_left_out


def deep(survival=0.5, name="resnet20"):
    torch.manual_seed(0)
    return models.stochastic_depth(models.build(name, 10, 1, 8), survival)


def test_survival_falls_linearly_to_that_of_the_last_unit():
    units = [m for m in deep().modules() if isinstance(m, Skippable)]
    expected = [1 - u / 9 * 0.5 for u in range(1, 10)]
    expected[3] = expected[6] = 1.0  # they change the shape
    assert [unit.survival for unit in units] == pytest.approx(expected)


@pytest.mark.parametrize("make", [BasicBlock, PreActBlock, Bottleneck])
def test_without_its_branch_a_unit_is_the_identity_and_with_it_the_branch_is_doubled(make):
    width = 4 * make.expansion
    unit, x = make(width, 4).double(), torch.rand(2, width, 5, 5, dtype=torch.float64)
    unit.survival = 1e-12
    assert unit(x) is x
    unit.survival = 0.5
    with nothing_left_out():
        found = unit(x)
    unit.survival = 1.0
    last = unit.conv2 if make is PreActBlock else getattr(unit, "bn3", unit.bn2)
    with torch.no_grad():
        last.weight *= 2
    assert torch.allclose(found, unit(x), atol=1e-12)


def test_in_tests_it_is_the_plain_network_bit_for_bit():
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(deep(0.3).eval()(x), deep(1.0).eval()(x))
    assert deep(0.3).state_dict().keys() == deep(1.0).state_dict().keys()


def test_balanced_cuts_count_a_unit_as_often_as_it_runs():
    full = split(deep(1.0), 3).costs
    some = split(deep(0.5), 3).costs
    units = [m for m in deep().modules() if isinstance(m, Skippable)]
    for before, after, unit in zip(full[1:10], some[1:10], units, strict=True):
        assert after.forward == pytest.approx(unit.survival * before.forward, rel=0.05)


def test_threads_and_virtual_links_leave_out_the_same_and_training_differs_from_the_whole():
    """Two blocks, four micro-batches with a path each."""

    def run(survival, **links):
        made = trainer(Backprop(micro_batches=4), train={"epochs": 1}, **links)
        models.stochastic_depth(made.blocks.model, survival)
        return trained_weights(made, digits(3))

    some = run(0.5)
    assert_same(run(0.5, links=LinkSettings(kind="virtual")), some)
    whole = run(1.0)
    assert any(not torch.equal(whole[name], some[name]) for name in whole)


def test_other_probabilities_and_networks_without_units_to_leave_out_are_refused():
    for survival in (0.0, -1.0, 1.5, float("nan")):
        said = refusal(models.stochastic_depth, deep(), survival)
        assert said == f"survival is {survival}; it must lie in (0, 1]"
    said = refusal(models.stochastic_depth, models.build("revnet8", 10, 1, 8), 0.5)
    assert said.startswith("survival is 0.5, but Chain has no unit that can be left out")


def test_replicas_which_would_leave_out_different_units_are_refused():
    made = trainer(Backprop(), replicas=2)
    models.stochastic_depth(made.blocks.model, 0.5)
    said = refusal(made.fit, *digits(3))
    assert said.startswith("split.replicas is 2, which works only where model.survival is 1")
