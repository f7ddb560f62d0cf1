"""Residual networks for small images: three stages of width 16, 32, 64."""

from collections.abc import Iterator

from torch import nn

from hybrid.models.chain import Chain
from hybrid.models.residual import (
    BasicBlock,
    PreActBlock,
    ShortcutMaker,
    ZeroPadShortcut,
    assemble,
    check_sizes,
    classifier,
    conv1x1,
    conv3x3,
    projection,
    stage,
)

STEM_WIDTH = 16


def resnet(
    depth: int = 20,
    classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    shortcut: str = "identity",
) -> Chain:
    """ResNet of depth 6n + 2 for (channels, image_size, image_size) (He et al. 2016, section 4.2).

    `shortcut` where a stage changes the shape: "identity" is He et al.'s option A (subsampling
    and zero channels, no parameters), the paper's choice; "projection" their option B.
    Raises `ValueError` for another depth or shortcut, classes < 2, channels < 1, image_size < 4.
    """
    check_sizes(classes, channels, image_size)
    num_blocks = _blocks_per_stage("resnet", depth, 2)
    maker = _chosen(shortcut, {"identity": ZeroPadShortcut, "projection": projection})
    stem = {
        "conv1": conv3x3(channels, STEM_WIDTH),
        "bn1": nn.BatchNorm2d(STEM_WIDTH),
        "relu": nn.ReLU(inplace=True),
    }
    stages = list(_stages(BasicBlock, num_blocks, 1, maker))
    image = channels, image_size, image_size
    return assemble(stem, stages, classifier(64, classes), image, classes)


def preact_resnet(
    depth: int = 20,
    classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    shortcut: str = "identity",
) -> Chain:
    """Pre-activation ResNet of depth 6n + 2 (He et al. 2016b, "Identity mappings", section 4).

    Arguments and errors as for `resnet`; "projection" is a 1x1 convolution without batch norm,
    since its input is already normalised and activated.
    """
    num_blocks = _blocks_per_stage("preact_resnet", depth, 2)
    maker = _chosen(shortcut, {"identity": ZeroPadShortcut, "projection": conv1x1})
    return _preactivated(num_blocks, 1, classes, channels, image_size, maker)


def wide_resnet(
    depth: int = 16, width: int = 4, classes: int = 10, channels: int = 3, image_size: int = 32
) -> Chain:
    """WRN-depth-width, depth 6n + 4, no dropout (Zagoruyko & Komodakis 2016, Table 1).

    `width` multiplies the channels of every stage. Raises `ValueError` for another depth,
    width < 1, classes < 2, channels < 1, image_size < 4.
    """
    num_blocks = _blocks_per_stage("wide_resnet", depth, 4)
    if width < 1:
        raise ValueError(f"width is {width}, the least is 1: set width >= 1")
    return _preactivated(num_blocks, width, classes, channels, image_size, conv1x1)


def _preactivated(
    num_blocks: int,
    width: int,
    classes: int,
    channels: int,
    image_size: int,
    shortcut: ShortcutMaker,
) -> Chain:
    check_sizes(classes, channels, image_size)
    stem: dict[str, nn.Module] = {"conv1": conv3x3(channels, STEM_WIDTH)}
    stages = list(_stages(PreActBlock, num_blocks, width, shortcut))
    head = classifier(64 * width, classes, activates=True)
    return assemble(stem, stages, head, (channels, image_size, image_size), classes)


def _stages(
    block: type[BasicBlock] | type[PreActBlock],
    num_blocks: int,
    width: int,
    shortcut: ShortcutMaker,
) -> Iterator[nn.Sequential]:
    yield stage(block, STEM_WIDTH, 16 * width, num_blocks, 1, shortcut)
    yield stage(block, 16 * width, 32 * width, num_blocks, 2, shortcut)
    yield stage(block, 32 * width, 64 * width, num_blocks, 2, shortcut)


def _blocks_per_stage(family: str, depth: int, offset: int) -> int:
    num_blocks, rest = divmod(depth - offset, 6)
    if num_blocks >= 1 and rest == 0:
        return num_blocks
    below = 6 * num_blocks + offset
    nearest = f"{below} or {below + 6}" if num_blocks >= 1 else f"{6 + offset}"
    raise ValueError(
        f"{family} has no depth {depth}, only 6n + {offset} with n >= 1: try {nearest}"
    )


def _chosen(shortcut: str, makers: dict[str, ShortcutMaker]) -> ShortcutMaker:
    if shortcut not in makers:
        raise ValueError(f"unknown shortcut {shortcut!r}: choose {' or '.join(makers)}")
    return makers[shortcut]
