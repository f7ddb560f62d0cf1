"""CIFAR residual networks against the papers' numbers."""

import pytest
import torch
from torch import nn

from hybrid.models import imagenet_resnet, preact_resnet, resnet, wide_resnet


@pytest.mark.parametrize(
    ("make", "arguments", "published"),
    [
        # He et al., table 6
        *((resnet, [d], m) for d, m in {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85}.items()),
        *((resnet, [depth], millions) for depth, millions in {110: 1.7, 1202: 19.4}.items()),
        (preact_resnet, [110], 1.7),
        # Zagoruyko and Komodakis
        (wide_resnet, [40, 4], 8.9),
        (wide_resnet, [16, 8], 11.0),
        (wide_resnet, [22, 8], 17.2),
        (wide_resnet, [28, 10], 36.5),
    ],
)
def test_a_model_has_the_millions_of_parameters_of_its_paper(make, arguments, published):
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make(*arguments).parameters())
    assert round(parameters / 1e6, 2 if published < 1 else 1) == published


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


@pytest.mark.parametrize(
    ("make", "depth"), [(resnet, 8), (preact_resnet, 8), (wide_resnet, 10), (imagenet_resnet, 18)]
)
@pytest.mark.parametrize("image_size", [4, 8])
def test_a_small_image_of_one_channel_trains(make, depth, image_size):
    model = make(depth=depth, channels=1, image_size=image_size)
    model(torch.randn(2, 1, image_size, image_size)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


BAD = [
    ({"depth": 21}, r"resnet has no depth 21, only 6n \+ 2 with n >= 1: try 20 or 26"),
    ({"depth": 3}, r"resnet has no depth 3, only 6n \+ 2 with n >= 1: try 8"),
    ({"depth": -4}, r"resnet has no depth -4, .*: try 8"),
    ({"classes": 1}, "classes is 1, the least is 2: set classes >= 2"),
    ({"channels": 0}, "channels is 0, the least is 1: set channels >= 1"),
    ({"image_size": 3}, "image_size is 3, the least is 4: set image_size >= 4"),
    ({"shortcut": "A"}, "unknown shortcut 'A': choose identity or projection"),
]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        *((make, *case) for make in (resnet, preact_resnet) for case in BAD),
        (wide_resnet, {"depth": 20}, r"wide_resnet has no depth 20, .*: try 16 or 22"),
        (wide_resnet, {"width": 0}, "width is 0, the least is 1: set width >= 1"),
        (imagenet_resnet, {"depth": 20}, "no depth 20, only 18, 34, 50, 101, 152: try 18"),
        (imagenet_resnet, {"classes": 0}, "classes is 0, the least is 2: set classes >= 2"),
        (imagenet_resnet, {"image_size": 0}, "image_size is 0, .* 4: set image_size >= 4"),
    ],
)
def test_a_bad_argument_is_named_with_its_limit_and_remedy(make, arguments, message):
    with pytest.raises(ValueError, match=message + "$"):
        make(**arguments)
