"""Reversible residual networks: two streams of channels, inputs recomputed from outputs."""

import torch
from torch import Tensor, nn

from hybrid.networks.models.residual import (
    assemble_chain,
    check_sizes,
    conv1x1,
    conv3x3,
    make_classifier,
)
from hybrid.networks.units import Chain
from hybrid.solvers.layers.residual import Reversible

LARGE_IMAGE = 64
"""Smaller images have a stem that keeps their size."""
BOTTLENECK = 4
STAGES: dict[int, tuple[bool, tuple[int, ...]]] = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
}
"""RevNets by ResNet's depth: whether F is a bottleneck, and the units of each stage."""


class Residual(nn.Module):
    """F: pre-activated convolutions, 3x3 twice or 1x1, 3x3, 1x1 (He et al. 2016b).

    (N, in_channels, H, W) -> (N, out_channels, H / stride, W / stride).
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, bottleneck: bool = False
    ) -> None:
        super().__init__()
        width = out_channels // BOTTLENECK if bottleneck else out_channels
        convolutions = [conv3x3(in_channels, width, stride), conv3x3(width, out_channels)]
        if bottleneck:
            convolutions = [
                conv1x1(in_channels, width),
                conv3x3(width, width, stride),
                conv1x1(width, out_channels),
            ]
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c.in_channels) for c in convolutions)

    def forward(self, x: Tensor) -> Tensor:
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = convolution(torch.relu(norm(x)))
        return x


class Downsampling(nn.Module):
    """(x1, x2) -> (P x2 + F(x1), P x1), P a strided 1x1 convolution: not reversible."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.residual = Residual(in_channels, out_channels, stride, bottleneck)
        self.shortcut = conv1x1(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        return torch.cat((self.shortcut(x2) + self.residual(x1), self.shortcut(x1)), dim=1)


class TwoStreams(nn.Module):
    """x -> (x, x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), dim=1)


def revnet(depth: int = 18, classes: int = 10, channels: int = 3, image_size: int = 32) -> Chain:
    """RevNet-18, 34 or 50, or for depth 6n + 2 a RevNet for small images.

    Each stream has the width of the ResNet of that depth, so the two have about the same weights.
    The first unit of a stage that changes the shape is not reversible, nor are stem and head.
    Raises `ValueError` for another depth, classes < 2, channels < 1, image_size < 4.
    """
    check_sizes(classes, channels, image_size)
    if depth in STAGES:
        (bottleneck, counts), width = STAGES[depth], 64
    else:
        units, rest = divmod(depth - 2, 6)
        if rest or units < 1:
            known = ", ".join(map(str, STAGES))
            raise ValueError(f"there is no revnet{depth}: the depth is 6n + 2 or one of {known}")
        bottleneck, counts, width = False, (units,) * 3, 16
    if depth in STAGES and image_size >= LARGE_IMAGE:
        conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        stem = {"conv1": conv1, "maxpool": nn.MaxPool2d(3, stride=2, padding=1)}
    else:
        stem = {"conv1": conv3x3(channels, width)}
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
    head = make_classifier(2 * width, classes, activates=True)
    return assemble_chain(stem, stages, head, (channels, image_size, image_size), classes)
