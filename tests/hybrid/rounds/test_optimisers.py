"""Which parameters decay."""

import pytest
import torch

from hybrid import models
from hybrid.rounds.optimisers import make
from hybrid.settings.config import OptimiserSettings


def decays(settings):
    model = models.build("resnet8", 10, 1, 8)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make(model, settings).param_groups
    return {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_biases_and_batch_norm_do_not_decay_unless_asked_to(name):
    found = decays(OptimiserSettings(name=name, weight_decay=0.01))
    assert found["layer1.0.conv1.weight"] == found["fc.weight"] == 0.01
    assert found["layer1.0.bn1.weight"] == found["fc.bias"] == 0.0
    everything = decays(OptimiserSettings(name=name, weight_decay=0.01, decay_all=True))
    assert set(everything.values()) == {0.01}
    assert everything.keys() == found.keys()


def test_a_block_without_parameters_has_an_optimiser_that_does_nothing():
    make(torch.nn.Sequential(torch.nn.ReLU()), OptimiserSettings()).step()
