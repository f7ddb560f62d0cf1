"""Residual networks as chains of units."""

from hybrid.models.chain import Chain, Unit, mode, units
from hybrid.models.cifar import preact_resnet, resnet, wide_resnet
from hybrid.models.factorised import factorised
from hybrid.models.imagenet import imagenet_resnet
from hybrid.models.names import build
from hybrid.models.reversible import revnet

__all__ = [
    "Chain",
    "Unit",
    "build",
    "factorised",
    "imagenet_resnet",
    "mode",
    "preact_resnet",
    "resnet",
    "revnet",
    "units",
    "wide_resnet",
]
