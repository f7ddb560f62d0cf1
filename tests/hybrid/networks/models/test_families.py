"""Residual networks against the papers' and torchvision's numbers and names, and model names."""

import pytest
import torch
from torch import nn

from hybrid.networks.models import build, imagenet_resnet, resnet, wide_resnet
from hybrid.networks.models.families import EXAMPLES, STAGES
from hybrid.networks.units import units


@pytest.mark.parametrize(
    ("make", "arguments", "published"),
    [
        # He et al., table 6
        *((resnet, [d], m) for d, m in {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85}.items()),
        # Zagoruyko and Komodakis
        (wide_resnet, [40, 4], 8.9),
        (wide_resnet, [28, 10], 36.5),
        # torchvision, in millions that have six digits behind the point
        (imagenet_resnet, [18], 11.689512),
        (imagenet_resnet, [50], 25.557032),
        (imagenet_resnet, [152], 60.192808),
    ],
)
def test_a_model_has_the_millions_of_parameters_that_are_published(make, arguments, published):
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make(*arguments).parameters())
    digits = 6 if make is imagenet_resnet else 2 if published < 1 else 1
    assert round(parameters / 1e6, digits) == published


def batch_norm(prefix):
    fields = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [f"{prefix}.{field}" for field in fields]


def torchvision_names(blocks, convolutions, first_is_projected):
    names = ["conv1.weight", *batch_norm("bn1")]
    for layer, num in enumerate(blocks, start=1):
        for block in range(num):
            prefix = f"layer{layer}.{block}"
            for i in range(1, convolutions + 1):
                names += [f"{prefix}.conv{i}.weight", *batch_norm(f"{prefix}.bn{i}")]
            if block == 0 and (layer > 1 or first_is_projected):
                names += [f"{prefix}.downsample.0.weight", *batch_norm(f"{prefix}.downsample.1")]
    return [*names, "fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("depth", "blocks", "convolutions", "first_is_projected"),
    [(50, [3, 4, 6, 3], 3, True), (18, [2, 2, 2, 2], 2, False)],
)
def test_a_resnet_has_torchvisions_names_in_order(depth, blocks, convolutions, first_is_projected):
    with torch.device("meta"):
        names = list(build(f"resnet{depth}", 1000, 3, 224).state_dict())
    assert names == torchvision_names(blocks, convolutions, first_is_projected)


@pytest.mark.parametrize(("stage", "width"), [("layer2", 16), ("layer3", 32)])
def test_an_identity_shortcut_subsamples_and_appends_zero_channels(stage, width):
    shortcut = resnet(8).get_submodule(f"{stage}.0.downsample")
    x = torch.randn(2, width, 7, 8)
    out = shortcut(x)
    assert out.shape == (2, 2 * width, 4, 4)
    assert torch.equal(out[:, :width], x[:, :, ::2, ::2])
    assert not out[:, width:].any()
    assert not list(shortcut.parameters())


def test_preactivation_blocks_shortcut_behind_the_activation_first_and_are_the_identity_later():
    model = wide_resnet(22)
    first, later = (model.get_submodule(f"layer1.{i}") for i in (0, 1))
    for block in (first, later):
        nn.init.zeros_(block.conv2.weight)
    x, y = torch.randn(2, 16, 8, 8), torch.randn(2, 64, 8, 8)
    assert torch.equal(first(x), first.downsample(torch.relu(first.bn1(x))))
    assert torch.equal(later(y), y)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (resnet, {"depth": 21}, r"resnet has no depth 21, only 6n \+ 2 with n >= 1: try 20 or 26"),
        (resnet, {"depth": -4}, r"resnet has no depth -4, .*: try 8"),
        (resnet, {"image_size": 3}, "image_size is 3, the least is 4: set image_size >= 4"),
        (wide_resnet, {"depth": 20}, r"wide_resnet has no depth 20, .*: try 16 or 22"),
        (wide_resnet, {"width": 0}, "width is 0, the least is 1: set width >= 1"),
        (wide_resnet, {"channels": 0}, "channels is 0, the least is 1: set channels >= 1"),
        (imagenet_resnet, {"depth": 20}, "no depth 20: choose one of 18, 34, 50, 101, 152"),
        (imagenet_resnet, {"classes": 1}, "classes is 1, the least is 2: set classes >= 2"),
    ],
)
def test_a_bad_argument_is_named_with_its_limit_and_remedy(make, arguments, message):
    with pytest.raises(ValueError, match=message + "$"):
        make(**arguments)


FOUR_STAGES = [f"net{depth}" for depth in STAGES]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_suggested_name_builds(name):
    with torch.device("meta"):
        model = build(name, 256, length=128) if name.startswith("gpt") else build(name, 10, 3, 32)
    assert units(model)
    # three stages for small images, four as in torchvision
    assert hasattr(model, "layer4") == (name.removeprefix("rev").removeprefix("res") in FOUR_STAGES)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rsnet20", "unknown model 'rsnet20': try 'resnet20'"),
        ("wrn-16", "unknown model 'wrn-16': try 'wrn-16-4'"),
        ("", "unknown model '': try 'resnet20'"),
        ("resnet99999999", "unknown model 'resnet99999999': try 'resnet"),
        ("resnet19", "try 14 or 20$"),
        ("wrn-1996-999", "take a smaller width$"),
    ],
)
def test_an_impossible_name_gets_the_nearest_one_in_one_line(name, remedy):
    with pytest.raises(ValueError, match=remedy) as error:
        build(name, 10, 3, 32)
    assert "\n" not in str(error.value)


def test_convolutions_start_kaiming_normal_with_fan_out_and_batch_norm_at_one_and_zero():
    torch.manual_seed(0)
    model = wide_resnet(10, 4)
    weight = model.get_parameter("layer3.0.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert torch.equal(model.get_parameter("bn.weight"), torch.ones(256))
    assert torch.equal(model.get_parameter("bn.bias"), torch.zeros(256))
