"""Residual networks and a GPT as chains of units."""

from hybrid.networks.models.families import NAME as NAME
from hybrid.networks.models.families import build as build
from hybrid.networks.models.families import imagenet_resnet as imagenet_resnet
from hybrid.networks.models.families import reads_texts as reads_texts
from hybrid.networks.models.families import resnet as resnet
from hybrid.networks.models.families import revnet as revnet
from hybrid.networks.models.families import stochastic_depth as stochastic_depth
from hybrid.networks.models.families import wide_resnet as wide_resnet
from hybrid.networks.models.gpt import gpt as gpt
from hybrid.networks.units import Chain as Chain
