"""The families of residual networks, and models by name, as the command line gives them."""

import os
import re
from typing import TypeVar

from torch import nn

from hybrid.networks.models.gpt import gpt
from hybrid.networks.models.residual import (
    BOTTLENECK,
    BasicBlock,
    Bottleneck,
    Downsampling,
    PreActBlock,
    Residual,
    TwoStreams,
    ZeroPadShortcut,
    assemble_chain,
    build_stages,
    conv1x1,
    conv3x3,
    projection,
)
from hybrid.networks.units import Chain
from hybrid.solvers.acting import nearest
from hybrid.solvers.layers.branches import Reversible, Skippable

STEM_WIDTH = 16
STAGES: dict[int, tuple[int, ...]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Units of the stages by depth (He et al. 2016, Table 1); from 50 on they are bottlenecks."""
REVERSIBLE = (18, 34, 50)
LARGE_IMAGE = 64
"""A RevNet's stem keeps the size of smaller images."""
# at most four digits: a longer number is a slip, and would build until the memory is full
NAME = re.compile(
    r"(?P<family>resnet|cifar-resnet|revnet)(?P<depth>[0-9]{1,4})"
    r"|wrn-(?P<wide_depth>[0-9]{1,4})-(?P<width>[0-9]{1,3})"
    r"|gpt-(?P<layers>[0-9]{1,4})-(?P<gpt_width>[0-9]{1,5})"
)
DEEPEST = 2000
"""Beyond ResNet-1202; ten thousand layers take minutes to build and to cut."""
EXAMPLES = (
    *(f"resnet{depth}" for depth in (8, 14, 20, 32, 44, 56, 110, *STAGES)),
    *("cifar-resnet50", "revnet18", "revnet34", "revnet50", "revnet20", "revnet110"),
    *("wrn-16-4", "wrn-28-10", "wrn-40-4"),
    *("gpt-4-128", "gpt-12-768"),
)

M = TypeVar("M", bound=nn.Module)


def build(
    name: str, classes: int, channels: int = 0, image_size: int = 0, *, length: int = 0
) -> Chain:
    """The model called `name`, for images (channels, image_size, image_size) or texts (length,).

    - `resnet18`, `34`, `50`, `101`, `152`: `imagenet_resnet`
    - any other `resnetN` and every `cifar-resnetN`, N = 6n + 2: `resnet`
    - `wrn-N-W`, N = 6n + 4: `wide_resnet`
    - `revnet18`, `34`, `50`, and `revnetN`, N = 6n + 2: `revnet`
    - `gpt-L-W`: `gpt`, whose classes are the tokens

    Raises `ValueError` for an unknown name, an impossible size, or samples of another kind.
    """
    match = NAME.fullmatch(name)
    if match is None:
        near = nearest(name, EXAMPLES) or "resnet20"
        raise ValueError(f"unknown model {name!r}: try {near!r} (families: {', '.join(FAMILIES)})")
    if reads_texts(name) != bool(length):
        reads, given = ("images", "texts") if length else ("texts", "images")
        other = "gpt-4-128 or data of images" if length else "a network of images or data.name=text"
        raise ValueError(f"{name} reads {reads}, and the data are {given}: choose {other}")
    family, depth = match["family"], int(match["depth"] or match["wide_depth"] or match["layers"])
    if depth > DEEPEST:
        raise ValueError(f"{name} has depth {depth}; it must be at most {DEEPEST}")
    if match["layers"]:
        width = int(match["gpt_width"])
        _check_memory(name, 12 * depth * width**2)
        return gpt(depth, width, classes, length)
    size = classes, channels, image_size
    if family is None:
        width = int(match["width"])
        # two 3 x 3 convolutions a block, (depth - 4) / 6 blocks of 16, 32 and 64 times the width
        _check_memory(name, 3 * (depth - 4) * (16**2 + 32**2 + 64**2) * width**2)
        return wide_resnet(depth, width, *size)
    if family == "revnet":
        return revnet(depth, *size)
    large = family == "resnet" and depth in STAGES
    return (imagenet_resnet if large else resnet)(depth, *size)


def reads_texts(name: str) -> bool:
    """Whether a name is of a model for texts."""
    match = NAME.fullmatch(name)
    return match is not None and match["layers"] is not None


def _check_memory(name: str, weights: int) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * weights > memory_bytes:
        raise ValueError(
            f"{name} has {4 * weights / 1e9:,.0f} GB of weights, this machine has "
            f"{memory_bytes / 1e9:,.0f} GB of memory: take a smaller width"
        )


def resnet(depth: int = 20, classes: int = 10, channels: int = 3, image_size: int = 32) -> Chain:
    """ResNet of depth 6n + 2 for (channels, image_size, image_size) (He et al. 2016, section 4.2).

    Three stages of width 16, 32, 64; where the shape changes, the shortcut is He et al.'s option A,
    subsampling and zero channels. Raises `ValueError` for another depth, classes < 2, channels < 1,
    image_size < 4.
    """
    image = _check_sizes(classes, channels, image_size)
    counts = _count_blocks("resnet", depth, 2)
    stem = {
        "conv1": conv3x3(channels, STEM_WIDTH),
        "bn1": nn.BatchNorm2d(STEM_WIDTH),
        "relu": nn.ReLU(inplace=True),
    }
    stages = build_stages(BasicBlock, STEM_WIDTH, 16, counts, ZeroPadShortcut)
    return assemble_chain(stem, *stages, image, classes)


def wide_resnet(
    depth: int = 16, width: int = 4, classes: int = 10, channels: int = 3, image_size: int = 32
) -> Chain:
    """WRN-depth-width, depth 6n + 4, no dropout (Zagoruyko & Komodakis 2016, Table 1).

    `width` multiplies the channels of every stage. A stage's first shortcut is a 1x1 convolution
    without batch norm, since its input is already normalized and activated. Raises `ValueError`
    for another depth, width < 1, classes < 2, channels < 1, image_size < 4.
    """
    image = _check_sizes(classes, channels, image_size, width)
    counts = _count_blocks("wide_resnet", depth, 4)
    stem: dict[str, nn.Module] = {"conv1": conv3x3(channels, STEM_WIDTH)}
    stages = build_stages(PreActBlock, STEM_WIDTH, 16 * width, counts, conv1x1)
    return assemble_chain(stem, *stages, image, classes, activates=True)


def imagenet_resnet(
    depth: int = 50, classes: int = 1000, channels: int = 3, image_size: int = 224
) -> Chain:
    """ResNet of depth 18, 34, 50, 101 or 152 (He et al. 2016, Table 1; option B shortcuts).

    Four stages of width 64 to 512; the `state_dict` has torchvision's names and shapes. The network
    reduces the image 32-fold; smaller images run, but their last stages see a single pixel.
    Raises `ValueError` for another depth, classes < 2, channels < 1, image_size < 4.
    """
    image = _check_sizes(classes, channels, image_size)
    if depth not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ValueError(f"imagenet_resnet has no depth {depth}: choose one of {known}")
    stem = {
        "conv1": nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    block = Bottleneck if depth >= 50 else BasicBlock
    return assemble_chain(
        stem, *build_stages(block, 64, 64, STAGES[depth], projection), image, classes
    )


def revnet(depth: int = 18, classes: int = 10, channels: int = 3, image_size: int = 32) -> Chain:
    """RevNet-18, 34 or 50, or for depth 6n + 2 a RevNet for small images.

    Each stream has the width of the ResNet of that depth, so the two have about the same weights.
    The first unit of a stage that changes the shape is not reversible, nor are stem and head.
    Raises `ValueError` for another depth, classes < 2, channels < 1, image_size < 4.
    """
    image = _check_sizes(classes, channels, image_size)
    four, bottleneck = depth in REVERSIBLE, depth == 50
    counts, width = STAGES[depth] if four else _count_blocks("revnet", depth, 2), 64 if four else 16
    stem: dict[str, nn.Module] = {}
    if four and image_size >= LARGE_IMAGE:
        stem["conv1"] = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        stem["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    else:
        stem["conv1"] = conv3x3(channels, width)
    stem["streams"] = TwoStreams()
    stages, out = [], width * (BOTTLENECK if bottleneck else 1)
    for number, count in enumerate(counts):
        blocks: list[nn.Module] = []
        if number or width != out:
            blocks.append(Downsampling(width, out, 2 if number else 1, bottleneck))
        while len(blocks) < count:
            blocks.append(Reversible(Residual(out, out, 1, bottleneck)))
        stages.append(nn.Sequential(*blocks))
        width, out = out, 2 * out
    return assemble_chain(stem, stages, 2 * width, image, classes, activates=True)


def stochastic_depth(model: M, survival: float) -> M:
    """`model`, whose u-th of U residual units survives with probability 1 - u/U (1 - survival).

    So the last one survives with `survival`, in (0, 1]; units that change the shape count, but are
    always there (Huang et al., arXiv 1603.09382, section 3). ValueError for another probability, or
    if no unit of the model can be left out.
    """
    if not 0 < survival <= 1:
        raise ValueError(f"survival is {survival}; it must lie in (0, 1]")
    units = [module for module in model.modules() if isinstance(module, Skippable)]
    if survival < 1 and not any(unit.skippable for unit in units):
        raise ValueError(
            f"survival is {survival}, but {type(model).__name__} has no unit that can be left out: "
            "leave it out, or take a resnet or a wide one"
        )
    for number, unit in enumerate(units, 1):
        unit.survival = 1 - number / len(units) * (1 - survival) if unit.skippable else 1.0
    return model


def _count_blocks(family: str, depth: int, offset: int) -> tuple[int, int, int]:
    """n in each of three stages, for depth 6n + `offset`."""
    n, rest = divmod(depth - offset, 6)
    if n < 1 or rest:
        below = 6 * n + offset
        near = f"{below} or {below + 6}" if n >= 1 else f"{6 + offset}"
        raise ValueError(
            f"{family} has no depth {depth}, only 6n + {offset} with n >= 1: try {near}"
        )
    return n, n, n


def _check_sizes(
    classes: int, channels: int, image_size: int, width: int = 1
) -> tuple[int, int, int]:
    """A sample's shape; `ValueError` for sizes that no residual network here can have."""
    limits = {
        "classes": (classes, 2),
        "channels": (channels, 1),
        "image_size": (image_size, 4),
        "width": (width, 1),
    }
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"{name} is {value}, the least is {least}: set {name} >= {least}")
    return channels, image_size, image_size


FAMILIES = {
    "resnetN, cifar-resnetN": resnet,
    "wrn-N-W": wide_resnet,
    "resnet18, 34, 50, 101, 152": imagenet_resnet,
    "revnetN, revnet18, 34, 50": revnet,
    "gpt-L-W": gpt,
}
"""Names, N, L and W numbers, and what builds them."""
