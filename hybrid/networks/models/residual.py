"""Residual blocks under torchvision's attribute names, and the shortcuts between their stages.

No block changes its input in place: at a cut the input is an autograd leaf.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.networks.units import Chain
from hybrid.solvers.layers.residual import Skippable

ShortcutMaker = Callable[[int, int, int], nn.Module]
"""(in_channels, out_channels, stride) -> the shortcut where a block changes its input's shape."""


class BasicBlock(Skippable):
    """Two 3x3 convolutions: relu(x + F(x)) (He et al. 2016, Figure 5 left).

    (samples, in_channels, height, width) -> (samples, width, height / stride, width / stride).
    """

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

    @property
    def skippable(self) -> bool:
        return is_identity_shortcut(self.downsample)

    def forward(self, x: Tensor) -> Tensor:
        if self.left_out():
            return x
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.scaled(self.bn2(self.conv2(out)))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out


class Bottleneck(Skippable):
    """1x1, 3x3, 1x1 convolutions: relu(x + F(x)) (He et al. 2016, Figure 5 right).

    The stride is in the 3x3 convolution as in torchvision ("ResNet v1.5"), not in the first 1x1.
    (samples, in_channels, height, width) -> (samples, 4 width, height / stride, width / stride).
    """

    expansion = 4

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

    @property
    def skippable(self) -> bool:
        return is_identity_shortcut(self.downsample)

    def forward(self, x: Tensor) -> Tensor:
        if self.left_out():
            return x
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.scaled(self.bn3(self.conv3(out)))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
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


def build_network(
    stem: dict[str, nn.Module],
    block: type[BasicBlock] | type[Bottleneck] | type[PreActBlock],
    in_channels: int,
    width: int,
    counts: Sequence[int],
    shortcut: ShortcutMaker,
    input_shape: tuple[int, int, int],
    classes: int,
) -> Chain:
    """A stage of so many blocks for each of `counts`, each of twice the width and half the size.

    The stem gives `in_channels`; the blocks of the first stage are of `width`.
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
    head = make_classifier(in_channels, classes, activates=block is PreActBlock)
    return assemble_chain(stem, stages, head, input_shape, classes)


def is_identity_shortcut(shortcut: nn.Module | None) -> bool:
    """Whether a shortcut is the identity: the unit without its branch, of x >= 0, is, too."""
    return shortcut is None or isinstance(shortcut, nn.Identity)


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps height and width up to the stride; no bias."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution; no bias."""
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


def assemble_chain(
    stem: dict[str, nn.Module],
    stages: Iterable[nn.Sequential],
    head: dict[str, nn.Module],
    input_shape: tuple[int, int, int],
    classes: int,
) -> Chain:
    """The chain of stem, layer1, layer2, ... and head, with fresh weights.

    Kaiming-normal convolutions, fan-out, ReLU gain (He et al. 2015); the rest is torch's own.
    """
    layers = {f"layer{number}": stage for number, stage in enumerate(stages, 1)}
    units = {"stem": tuple(stem), **{name: (name,) for name in layers}, "head": tuple(head)}
    chain = Chain(OrderedDict(**stem, **layers, **head), units, input_shape, classes)
    for module in chain.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return chain


def make_classifier(features: int, classes: int, activates: bool = False) -> dict[str, nn.Module]:
    """The mean over the pixels and a linear layer; before it, if asked, batch norm and ReLU."""
    before = {"bn": nn.BatchNorm2d(features), "relu": nn.ReLU(inplace=True)} if activates else {}
    return {
        **before,
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(features, classes),
    }


def check_sizes(classes: int, channels: int, image_size: int) -> None:
    """Raise `ValueError` for sizes that no residual network here can have."""
    limits = {"classes": (classes, 2), "channels": (channels, 1), "image_size": (image_size, 4)}
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"{name} is {value}, the least is {least}: set {name} >= {least}")
