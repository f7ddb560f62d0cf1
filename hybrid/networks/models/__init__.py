"""Residual networks and a GPT as chains of units."""

from hybrid.networks.models.families import (
    NAME,
    build,
    imagenet_resnet,
    reads_texts,
    resnet,
    revnet,
    stochastic_depth,
    wide_resnet,
)
from hybrid.networks.models.gpt import gpt
from hybrid.networks.units import Chain

__all__ = [
    "NAME",
    "Chain",
    "build",
    "gpt",
    "imagenet_resnet",
    "reads_texts",
    "resnet",
    "revnet",
    "stochastic_depth",
    "wide_resnet",
]
