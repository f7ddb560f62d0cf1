"""CIFAR residual networks against the papers' numbers."""

import pytest
import torch
from torch import nn

from hybrid.models import preact_resnet, resnet, units, wide_resnet


def millions(model: nn.Module, digits: int) -> float:
    return round(sum(p.numel() for p in model.parameters()) / 1e6, digits)


@pytest.mark.parametrize(
    ("depth", "published"),
    [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7), (1202, 19.4)],
)
def test_a_resnet_has_the_parameters_of_he_et_al_table_6(depth, published):
    with torch.device("meta"):
        model = resnet(depth)
    assert millions(model, 1 if depth >= 110 else 2) == published


@pytest.mark.parametrize(
    ("depth", "width", "published"),
    [(40, 4, 8.9), (16, 8, 11.0), (22, 8, 17.2), (28, 10, 36.5)],
)
def test_a_wide_resnet_has_the_parameters_of_zagoruyko_and_komodakis(depth, width, published):
    with torch.device("meta"):
        model = wide_resnet(depth, width)
    assert millions(model, 1) == published


def test_a_preactivation_resnet_110_has_1_7_million_parameters():
    with torch.device("meta"):
        assert millions(preact_resnet(110), 1) == 1.7


@pytest.mark.parametrize("make", [resnet, preact_resnet])
def test_a_model_of_depth_6n_plus_2_has_3n_blocks(make):
    with torch.device("meta"):
        assert len(units(make(depth=26))) == 3 * 4 + 2


@pytest.mark.parametrize("make", [resnet, preact_resnet])
def test_identity_shortcuts_have_no_parameters(make):
    with torch.device("meta"):
        identity, project = make(depth=8), make(depth=8, shortcut="projection")
    added = set(project.state_dict()) - set(identity.state_dict())
    assert added
    assert all("downsample" in name for name in added)
    assert not any("downsample" in name for name in identity.state_dict())


@pytest.mark.parametrize("stage", ["layer2", "layer3"])
def test_an_identity_shortcut_subsamples_and_appends_zero_channels(stage):
    shortcut = resnet(8).get_submodule(f"{stage}.0.downsample")
    width = 16 if stage == "layer2" else 32
    x = torch.randn(2, width, 7, 8)
    out = shortcut(x)
    assert out.shape == (2, 2 * width, 4, 4)
    assert torch.equal(out[:, :width], x[:, :, ::2, ::2])
    assert not out[:, width:].any()


def test_a_projection_shortcut_of_a_postactivation_block_is_a_convolution_and_batch_norm():
    shortcut = resnet(8, shortcut="projection").get_submodule("layer2.0.downsample")
    assert [type(module) for module in shortcut.children()] == [nn.Conv2d, nn.BatchNorm2d]


@pytest.mark.parametrize("make", [preact_resnet, wide_resnet])
def test_the_shortcut_of_a_stages_first_preactivation_block_starts_behind_the_activation(make):
    block = make(depth=22 if make is wide_resnet else 20).get_submodule("layer1.0")
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    expected = block.downsample(torch.relu(block.bn1(x)))
    assert torch.equal(block(x), expected)


def test_a_later_preactivation_block_with_a_zero_residual_is_the_identity():
    block = preact_resnet(20).get_submodule("layer1.1")
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(x), x)


def test_convolutions_start_kaiming_normal_with_fan_out_and_batch_norm_at_one_and_zero():
    torch.manual_seed(0)
    model = wide_resnet(10, 4)
    weight = model.get_parameter("layer3.0.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert torch.equal(model.get_parameter("bn.weight"), torch.ones(256))
    assert torch.equal(model.get_parameter("bn.bias"), torch.zeros(256))


def test_the_same_seed_gives_the_same_model():
    torch.manual_seed(3)
    first = resnet(8).state_dict()
    torch.manual_seed(3)
    second = resnet(8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("make", [resnet, preact_resnet, wide_resnet])
@pytest.mark.parametrize("image_size", [4, 8])
def test_a_small_image_of_one_channel_trains(make, image_size):
    model = make(depth=10 if make is wide_resnet else 8, channels=1, image_size=image_size)
    model(torch.randn(2, 1, image_size, image_size)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 21}, r"resnet has no depth 21, only 6n \+ 2 with n >= 1: try 20 or 26"),
        ({"depth": 3}, r"resnet has no depth 3, only 6n \+ 2 with n >= 1: try 8"),
        ({"depth": -4}, r"resnet has no depth -4, .*: try 8"),
        ({"classes": 1}, "classes is 1, the least is 2: set classes >= 2"),
        ({"channels": 0}, "channels is 0, the least is 1: set channels >= 1"),
        ({"image_size": 3}, "image_size is 3, the least is 4: set image_size >= 4"),
        ({"shortcut": "A"}, "unknown shortcut 'A': choose identity or projection"),
    ],
)
@pytest.mark.parametrize("make", [resnet, preact_resnet])
def test_a_bad_argument_is_named_with_its_limit_and_remedy(make, arguments, message):
    with pytest.raises(ValueError, match=message + "$"):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 20}, r"wide_resnet has no depth 20, .*: try 16 or 22"),
        ({"width": 0}, "width is 0, the least is 1: set width >= 1"),
    ],
)
def test_a_bad_wide_resnet_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message + "$"):
        wide_resnet(**arguments)
