"""A network with a factorization, as `--model factorized:small` names it."""

from collections import OrderedDict

from torch import nn

from hybrid.networks import models
from hybrid.solvers.layers.projection import Factorization


def small() -> nn.Sequential:
    """A ResNet-8 with two factors before its second stage, of the first one's 16 channels."""
    network = models.build("resnet8", 4, channels=1, image_size=4)
    stage = OrderedDict(factors=Factorization(16, 2), **dict(network.layer2.named_children()))
    network.layer2 = nn.Sequential(stage)
    return network
