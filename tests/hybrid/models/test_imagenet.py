"""ImageNet residual networks against torchvision's names and counts."""

import pytest
import torch

from hybrid.models import imagenet_resnet

COUNTS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


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


@pytest.mark.parametrize(("depth", "count"), COUNTS.items())
def test_a_resnet_has_torchvisions_parameter_count(depth, count):
    with torch.device("meta"):
        model = imagenet_resnet(depth)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("depth", "blocks", "convolutions", "first_is_projected"),
    [(50, [3, 4, 6, 3], 3, True), (18, [2, 2, 2, 2], 2, False)],
)
def test_a_resnet_has_torchvisions_names_in_order(depth, blocks, convolutions, first_is_projected):
    with torch.device("meta"):
        names = list(imagenet_resnet(depth).state_dict())
    assert names == torchvision_names(blocks, convolutions, first_is_projected)


def test_a_bottleneck_strides_in_its_3x3_convolution():
    with torch.device("meta"):
        block = imagenet_resnet(50).get_submodule("layer2.0")
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))
