"""Residual networks for small images: three stages of width 16, 32, 64."""

from torch import nn

from hybrid.models import residual
from hybrid.models.chain import Chain

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
    size = classes, channels, image_size
    return _small("resnet", residual.BasicBlock, depth, 2, 1, shortcut, *size)


def preact_resnet(
    depth: int = 20,
    classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    shortcut: str = "identity",
) -> Chain:
    """Pre-activation ResNet of depth 6n + 2 (He et al. 2016b, "Identity mappings", section 4).

    Arguments and errors as for `resnet`; "projection" is a 1x1 convolution without batch norm,
    since its input is already normalized and activated.
    """
    size = classes, channels, image_size
    return _small("preact_resnet", residual.PreActBlock, depth, 2, 1, shortcut, *size)


def wide_resnet(
    depth: int = 16, width: int = 4, classes: int = 10, channels: int = 3, image_size: int = 32
) -> Chain:
    """WRN-depth-width, depth 6n + 4, no dropout (Zagoruyko & Komodakis 2016, Table 1).

    `width` multiplies the channels of every stage. Raises `ValueError` for another depth,
    width < 1, classes < 2, channels < 1, image_size < 4.
    """
    if width < 1:
        raise ValueError(f"width is {width}, the least is 1: set width >= 1")
    size = classes, channels, image_size
    return _small("wide_resnet", residual.PreActBlock, depth, 4, width, "projection", *size)


def _small(
    family: str,
    block: type[residual.BasicBlock] | type[residual.PreActBlock],
    depth: int,
    offset: int,
    width: int,
    shortcut: str,
    classes: int,
    channels: int,
    image_size: int,
) -> Chain:
    """The network of depth 6n + `offset`, with n blocks a stage."""
    n, rest = divmod(depth - offset, 6)
    if n < 1 or rest:
        below = 6 * n + offset
        near = f"{below} or {below + 6}" if n >= 1 else f"{6 + offset}"
        raise ValueError(
            f"{family} has no depth {depth}, only 6n + {offset} with n >= 1: try {near}"
        )
    residual.check_sizes(classes, channels, image_size)
    if shortcut not in ("identity", "projection"):
        raise ValueError(f"unknown shortcut {shortcut!r}: choose identity or projection")
    before = block is residual.PreActBlock
    projected = residual.conv1x1 if before else residual.projection
    maker = residual.ZeroPadShortcut if shortcut == "identity" else projected
    stem: dict[str, nn.Module] = {"conv1": residual.conv3x3(channels, STEM_WIDTH)}
    if not before:
        stem |= {"bn1": nn.BatchNorm2d(STEM_WIDTH), "relu": nn.ReLU(inplace=True)}
    image = channels, image_size, image_size
    return residual.build_network(
        stem, block, STEM_WIDTH, 16 * width, (n, n, n), maker, image, classes
    )
