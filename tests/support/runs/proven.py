"""Runs on ranks whose networks differ, since nothing seeds them alike."""

from typing import Any

import torch
from torch import nn
from trainings import trainer_of
from world import launched

from hybrid.solvers import Backprop


def unlike_networks(comm: Any) -> list[str]:
    """What two trainings, one after the other, say of their proofs."""
    torch.manual_seed(comm.rank)
    layers = [nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3)]
    random = torch.Generator().manual_seed(0)
    samples = torch.randn(32, 6, generator=random), torch.randint(3, (32,), generator=random)
    with launched(comm):
        made = trainer_of(nn.Sequential(*layers), Backprop(), cuts=["2"], metrics={})
        return [made.fit(samples)["proof"] for _ in range(2)]
