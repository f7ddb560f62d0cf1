"""ImageNet residual networks against torchvision's names and counts."""

import pytest
import torch

from hybrid.models import imagenet_resnet

COUNTS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


def batch_norm(prefix: str) -> list[str]:
    fields = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [f"{prefix}.{field}" for field in fields]


def torchvision_names(blocks: list[int], convolutions: int, first_is_projected: bool) -> list[str]:
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


def test_resnet50_has_torchvisions_names_in_order():
    with torch.device("meta"):
        names = list(imagenet_resnet(50).state_dict())
    assert names == torchvision_names([3, 4, 6, 3], convolutions=3, first_is_projected=True)


def test_resnet18_has_torchvisions_names_in_order():
    with torch.device("meta"):
        names = list(imagenet_resnet(18).state_dict())
    assert names == torchvision_names([2, 2, 2, 2], convolutions=2, first_is_projected=False)


def test_a_bottleneck_strides_in_its_3x3_convolution():
    with torch.device("meta"):
        block = imagenet_resnet(50).get_submodule("layer2.0")
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_an_image_is_reduced_32_fold_before_the_pooling():
    with torch.device("meta"):
        model = imagenet_resnet(18)
        features = model[:-3](torch.empty(1, 3, 224, 224))
    assert features.shape == (1, 512, 7, 7)


def test_an_8_by_8_image_of_one_channel_trains():
    model = imagenet_resnet(18, classes=10, channels=1, image_size=8)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 20}, "no depth 20, only 18, 34, 50, 101, 152: try 18"),
        ({"classes": 0}, "classes is 0, the least is 2: set classes >= 2"),
        ({"image_size": 0}, "image_size is 0, the least is 4: set image_size >= 4"),
    ],
)
def test_a_bad_argument_is_named_with_its_limit_and_remedy(arguments, message):
    with pytest.raises(ValueError, match=message + "$"):
        imagenet_resnet(**arguments)
