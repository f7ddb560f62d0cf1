"""Residual units, under torchvision's names where it has them, and chains of their stages.

No unit changes its input in place: at a cut the input is an autograd leaf.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.networks.units import Chain
from hybrid.solvers.layers.branches import Skippable

ShortcutMaker = Callable[[int, int, int], nn.Module]
"""(in_channels, out_channels, stride) -> the shortcut where a block changes its input's shape."""
BOTTLENECK = 4
"""Channels of a bottleneck's ends over those of its middle."""


class _Activated(Skippable):
    """relu(x + F(x)).

    (samples, in_channels, height, width) -> (samples, expansion * width, height / stride, ...).
    """

    relu: nn.Module
    downsample: nn.Module | None

    @property
    def skippable(self) -> bool:
        # without its branch the unit is the identity then, too, as x >= 0
        return self.downsample is None or isinstance(self.downsample, nn.Identity)

    def branch(self, x: Tensor) -> Tensor:
        """F(x) of x (N, C, H, W), in the shape of the shortcut's output."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.left_out():
            return x
        out = self.scaled(self.branch(x))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class BasicBlock(_Activated):
    """Two 3x3 convolutions (He et al. 2016, Figure 5 left)."""

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return out


class Bottleneck(_Activated):
    """1x1, 3x3, 1x1 convolutions (He et al. 2016, Figure 5 right).

    The stride is in the 3x3 convolution as in torchvision ("ResNet v1.5"), not in the first 1x1.
    """

    expansion = BOTTLENECK

    def __init__(
        self, in_channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = conv1x1(in_channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.bn3(self.conv3(x))
        return out


class PreActBlock(Skippable):
    """Batch norm and ReLU before each 3x3 convolution: x + F(x) (He et al. 2016b, Figure 4e).

    A given `downsample` takes the activated input, as for the first block of a stage in
    He et al. 2016b (appendix) and Zagoruyko & Komodakis 2016.
    (samples, in_channels, height, width) -> (samples, width, height / stride, width / stride).
    """

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv3x3(in_channels, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    @property
    def skippable(self) -> bool:
        return self.downsample is None

    def forward(self, x: Tensor) -> Tensor:
        if self.left_out():
            return x
        activated: Tensor = self.relu(self.bn1(x))
        out: Tensor = self.scaled(self.conv2(self.relu(self.bn2(self.conv1(activated)))))
        out += x if self.downsample is None else self.downsample(activated)
        return out


class Residual(nn.Module):
    """A RevNet's F: pre-activated convolutions, 3x3 twice or 1x1, 3x3, 1x1 (He et al. 2016b).

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


class ZeroPadShortcut(nn.Module):
    """Option A: every `stride`-th pixel, the new channels zero; no parameters.

    He et al. 2016, section 3.3 and 4.2. The zeros follow the old channels.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = out_channels - in_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels))


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Option B: a 1x1 convolution and batch norm (He et al. 2016, section 3.3)."""
    return nn.Sequential(conv1x1(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels))


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps height and width up to the stride; no bias."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution; no bias."""
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


def build_stages(
    block: type[BasicBlock] | type[Bottleneck] | type[PreActBlock],
    in_channels: int,
    width: int,
    counts: Sequence[int],
    shortcut: ShortcutMaker,
) -> tuple[list[nn.Sequential], int]:
    """The stages, of `counts` blocks each, and the channels of the last one.

    The blocks of the first stage are of `width`; each further stage has twice the width and half
    the size.
    """
    stages = []
    for number, count in enumerate(counts):
        out_channels, stride = width * block.expansion, 2 if number else 1
        reshapes = stride != 1 or in_channels != out_channels
        # Identity, not None: a pre-activation stage's first shortcut starts behind the activation
        first = shortcut(in_channels, out_channels, stride) if reshapes else nn.Identity()
        blocks = [block(in_channels, width, stride, first)]
        blocks += [block(out_channels, width) for _ in range(count - 1)]
        stages.append(nn.Sequential(*blocks))
        in_channels, width = out_channels, 2 * width
    return stages, in_channels


def assemble_chain(
    stem: dict[str, nn.Module],
    stages: Iterable[nn.Sequential],
    features: int,
    input_shape: tuple[int, int, int],
    classes: int,
    activates: bool = False,
) -> Chain:
    """The chain of stem, layer1, layer2, ... and head, with fresh weights.

    The head is the mean over the pixels of `features` channels and a linear layer; before it, where
    it `activates`, batch norm and ReLU. Kaiming-normal convolutions, fan-out, ReLU gain (He et al.
    2015); the rest is torch's own.
    """
    head: dict[str, nn.Module] = {}
    if activates:
        head = {"bn": nn.BatchNorm2d(features), "relu": nn.ReLU(inplace=True)}
    head |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    head["fc"] = nn.Linear(features, classes)
    layers = {f"layer{number}": stage for number, stage in enumerate(stages, 1)}
    units = {"stem": tuple(stem), **{name: (name,) for name in layers}, "head": tuple(head)}
    chain = Chain(OrderedDict(**stem, **layers, **head), units, input_shape, classes)
    for module in chain.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return chain
