"""Models by name, as the command line and the run configuration give them."""

import os
import re

from hybrid.models.chain import Chain
from hybrid.models.cifar import preact_resnet, resnet, wide_resnet
from hybrid.models.imagenet import BLOCKS_PER_STAGE, imagenet_resnet
from hybrid.models.reversible import revnet
from hybrid.solvers.checks import nearest

# at most four digits: a longer number is a slip, and would build until the memory is full
NAME = re.compile(
    r"(?P<family>resnet|cifar-resnet|preact-resnet|revnet)(?P<depth>[0-9]{1,4})"
    r"|wrn-(?P<wide_depth>[0-9]{1,4})-(?P<width>[0-9]{1,3})"
)
DEEPEST = 2000
"""Beyond ResNet-1202; ten thousand layers take minutes to build and to cut."""
EXAMPLES = (
    *(f"resnet{depth}" for depth in (8, 14, 20, 32, 44, 56, 110, *BLOCKS_PER_STAGE)),
    *("cifar-resnet50", "preact-resnet20", "preact-resnet110"),
    *("revnet18", "revnet34", "revnet50", "revnet20", "revnet110"),
    *("wrn-16-4", "wrn-28-10", "wrn-40-4"),
)

FAMILIES = {
    "resnetN, cifar-resnetN": resnet,
    "preact-resnetN": preact_resnet,
    "wrn-N-W": wide_resnet,
    "resnet18, 34, 50, 101, 152": imagenet_resnet,
    "revnetN, revnet18, 34, 50": revnet,
}
"""Names, N and W numbers, and what builds them."""


def build(
    name: str, classes: int, channels: int, image_size: int, shortcut: str | None = None
) -> Chain:
    """The model called `name`, for samples of shape (channels, image_size, image_size).

    - `resnet18`, `34`, `50`, `101`, `152`: `imagenet_resnet`
    - any other `resnetN` and every `cifar-resnetN`, N = 6n + 2: `resnet`
    - `preact-resnetN`, N = 6n + 2: `preact_resnet`
    - `wrn-N-W`, N = 6n + 4: `wide_resnet`
    - `revnet18`, `34`, `50`, and `revnetN`, N = 6n + 2: `revnet`

    `shortcut` is "identity" or "projection", None the model's own; ImageNet ResNets and wide
    ResNets are defined with projections only.
    Raises `ValueError` for an unknown name, an impossible depth or size, an unfit shortcut.
    """
    match = NAME.fullmatch(name)
    if match is None:
        near = nearest(name, EXAMPLES) or "resnet20"
        raise ValueError(
            f"unknown model {name!r}: try {near!r} "
            "(families: resnetN, cifar-resnetN, preact-resnetN, revnetN, wrn-N-W)"
        )
    family, depth = match["family"], int(match["depth"] or match["wide_depth"])
    if depth > DEEPEST:
        raise ValueError(f"{name} has depth {depth}; it must be at most {DEEPEST}")
    size = classes, channels, image_size
    if family == "resnet" and depth not in BLOCKS_PER_STAGE:
        _check_depth(depth)
        family = "cifar-resnet"
    if family in ("cifar-resnet", "preact-resnet"):
        make = resnet if family == "cifar-resnet" else preact_resnet
        return make(depth, *size, "identity" if shortcut is None else shortcut)
    if shortcut not in (None, "projection"):
        raise ValueError(f"{name} has no shortcut {shortcut!r}: choose projection, or leave it out")
    if family is not None:
        return (revnet if family == "revnet" else imagenet_resnet)(depth, *size)
    width = int(match["width"])
    _check_memory(name, depth, width)
    return wide_resnet(depth, width, *size)


def _check_memory(name: str, depth: int, width: int) -> None:
    # two 3 x 3 convolutions a block, (depth - 4) / 6 blocks of 16, 32 and 64 times the width
    weights_bytes = 4 * 3 * (depth - 4) * (16**2 + 32**2 + 64**2) * width**2
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights_bytes > memory_bytes:
        raise ValueError(
            f"{name} has {weights_bytes / 1e9:,.0f} GB of weights, this machine has "
            f"{memory_bytes / 1e9:,.0f} GB of memory: take a smaller width"
        )


def _check_depth(depth: int) -> None:
    # resnetN names two families, so the nearest depth may be in either
    valid = {8, *BLOCKS_PER_STAGE, *range(8, depth + 7, 6)}
    if depth not in valid:
        below = max((v for v in valid if v < depth), default=None)
        above = min(v for v in valid if v > depth)
        nearest = f"resnet{above}" if below is None else f"resnet{below} or resnet{above}"
        raise ValueError(
            f"there is no resnet{depth}: N is 6n + 2 (CIFAR) or one of "
            f"{', '.join(map(str, BLOCKS_PER_STAGE))} (ImageNet): try {nearest}"
        )
