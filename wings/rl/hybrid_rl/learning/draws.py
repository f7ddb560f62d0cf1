"""Random numbers as a function of (seed, who draws, when): a checkpoint needs to keep none."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

WEIGHTS, REPLAY, PRETRAINING, LEARNER, ACTIONS, EPISODES, EVALUATION = range(7)
"""What a generator is for."""


def number(*seeds: int) -> int:
    """A 64-bit number that depends only on the seeds."""
    (found,) = np.random.SeedSequence(seeds).generate_state(1, np.uint64).tolist()
    return int(found)


def generator(*seeds: int) -> torch.Generator:
    """A new generator, seeded by `number`."""
    return torch.Generator().manual_seed(number(*seeds))


@torch.no_grad()
def initialize(network: nn.Module, draws: torch.Generator) -> None:
    """Weights and biases of linear layers, uniform in +-1/sqrt(inputs), as torch begins them.

    From a generator: torch's own draws are shared by all threads of a process.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=draws)
            layer.bias.uniform_(-bound, bound, generator=draws)
