"""Auxiliary heads as a user writes them, chosen by name."""

from typing import Any

from torch import Tensor, nn


def normed(index: int, shape: Any, output: Any) -> nn.Module:
    """A convolution with BatchNorm before the pooling."""
    norm, pool = nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1)
    conv = nn.Conv2d(shape[0], 6, 3, padding=1)
    return nn.Sequential(conv, norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(6, *output))


def drawing(index: int, shape: Any, output: Any) -> nn.Module:
    """The same with dropout."""
    return nn.Sequential(nn.Dropout(0.3), normed(index, shape, output))


def flat(index: int, shape: Any, output: Any) -> nn.Module:
    """Of another shape than the network's output."""
    return nn.Flatten()


def function(index: int, shape: Any, output: Any) -> Any:
    """No module."""
    return Tensor.flatten


def lazy(index: int, shape: Any, output: Any) -> nn.Module:
    """Whose sizes follow from its first input."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(7), nn.Dropout(0.5), nn.LazyLinear(*output))


def unlike(index: int, shape: Any, output: Any) -> nn.Module:
    """For other inputs."""
    return nn.Linear(3, 10)


def failing(index: int, shape: Any, output: Any) -> nn.Module:
    return nn.Linear(shape[7], 1)
