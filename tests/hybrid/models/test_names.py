"""Model names: what each one builds, and what an unknown one suggests."""

import pytest
import torch

from hybrid.models import build, imagenet_resnet, preact_resnet, resnet, units, wide_resnet
from hybrid.models.names import EXAMPLES


def shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("resnet20", lambda: resnet(20, 7, 1, 8)),
        ("resnet18", lambda: imagenet_resnet(18, 7, 1, 8)),
        ("resnet50", lambda: imagenet_resnet(50, 7, 1, 8)),
        ("cifar-resnet50", lambda: resnet(50, 7, 1, 8)),
        ("preact-resnet20", lambda: preact_resnet(20, 7, 1, 8)),
        ("wrn-16-4", lambda: wide_resnet(16, 4, 7, 1, 8)),
    ],
)
def test_a_name_builds_its_model(name, make):
    with torch.device("meta"):
        assert shapes(build(name, classes=7, channels=1, image_size=8)) == shapes(make())


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_suggested_name_builds(name):
    with torch.device("meta"):
        assert units(build(name, 10, 3, 32))


@pytest.mark.parametrize("name", ["resnet18", "wrn-10-1"])
def test_a_model_of_projections_refuses_identity_shortcuts(name):
    with pytest.raises(ValueError, match=f"^{name} has no shortcut 'identity': choose projection"):
        build(name, 10, 3, 32, shortcut="identity")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rsnet20", "unknown model 'rsnet20': try 'resnet20'"),
        ("ResNet20", "unknown model 'ResNet20': try 'resnet20'"),
        ("wrn-16", "unknown model 'wrn-16': try 'wrn-16-4'"),
        ("", "unknown model '': try 'resnet20'"),
        ("resnet99999999", "unknown model 'resnet99999999': try 'resnet"),
        ("resnet19", "try resnet18 or resnet20$"),
        ("resnet100", "try resnet98 or resnet101$"),
        ("resnet0", "try resnet8$"),
        ("resnet157", "try resnet152 or resnet158$"),
        ("cifar-resnet18", "no depth 18, .*: try 14 or 20$"),
    ],
)
def test_an_impossible_name_gets_the_nearest_one_in_one_line(name, remedy):
    with pytest.raises(ValueError, match=remedy) as error:
        build(name, 10, 3, 32)
    assert "\n" not in str(error.value)
