"""Residual networks as chains of units."""

from hybrid.models.chain import Chain, Unit, check_units, full_name, is_sequence, mode, units
from hybrid.models.cifar import preact_resnet, resnet, wide_resnet
from hybrid.models.depth import stochastic_depth
from hybrid.models.factorized import factorized
from hybrid.models.imagenet import imagenet_resnet
from hybrid.models.names import NAME, build
from hybrid.models.reversible import revnet

__all__ = [
    "NAME",
    "Chain",
    "Unit",
    "build",
    "check_units",
    "factorized",
    "full_name",
    "imagenet_resnet",
    "is_sequence",
    "mode",
    "preact_resnet",
    "resnet",
    "revnet",
    "stochastic_depth",
    "units",
    "wide_resnet",
]
