"""Residual networks as chains of units."""

from hybrid.networks.models.families import (
    NAME,
    build,
    imagenet_resnet,
    resnet,
    revnet,
    stochastic_depth,
    wide_resnet,
)
from hybrid.networks.units import Chain

__all__ = [
    "NAME",
    "Chain",
    "build",
    "imagenet_resnet",
    "resnet",
    "revnet",
    "stochastic_depth",
    "wide_resnet",
]
