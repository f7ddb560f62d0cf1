"""Residual networks for large images: four stages of width 64 to 512, torchvision's names."""

from torch import nn

from hybrid.models.chain import Chain
from hybrid.models.residual import BasicBlock, Bottleneck, build_network, check_sizes, projection

BLOCKS_PER_STAGE: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


def imagenet_resnet(
    depth: int = 50, classes: int = 1000, channels: int = 3, image_size: int = 224
) -> Chain:
    """ResNet of depth 18, 34, 50, 101 or 152 (He et al. 2016, Table 1; option B shortcuts).

    The `state_dict` has torchvision's names and shapes. The network reduces the image 32-fold;
    smaller images run, but their last stages see a single pixel.
    Raises `ValueError` for another depth, classes < 2, channels < 1, image_size < 4.
    """
    check_sizes(classes, channels, image_size)
    if depth not in BLOCKS_PER_STAGE:
        nearest = min(BLOCKS_PER_STAGE, key=lambda known: abs(known - depth))
        known = ", ".join(map(str, BLOCKS_PER_STAGE))
        raise ValueError(f"imagenet_resnet has no depth {depth}, only {known}: try {nearest}")
    block, num_blocks = BLOCKS_PER_STAGE[depth]
    stem = {
        "conv1": nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    image = channels, image_size, image_size
    return build_network(stem, block, 64, 64, num_blocks, projection, image, classes)
