"""Runs in 16 bits that are right are not refused for what rounding alone does to a gradient."""

import pytest
import torch
from torch import nn

from hybrid import Trainer, split
from hybrid.proof import proof
from hybrid.solvers import Backprop

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
DATA = X, torch.arange(64) % 4


def proven(net, precision, **how):
    train = {"epochs": 1, "batch_size": 16, "threads": 1, "verify": "always", **how}
    cut = split(net, 2, sample=X[:4])
    made = Trainer(cut, Backprop(), train={**train, "precision": precision}, quiet=True)
    return made.fit(DATA)["proof"]


def deep():
    """Normalized over the two samples of a part, it turns small changes into large ones."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(24)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def test_a_gradient_that_rounding_changes_as_much_is_not_refused(monkeypatch):
    assert proven(deep(), "bfloat16") == "passed"
    monkeypatch.setattr(proof, "ROUNDED_STEP", proof.STEP)
    with pytest.raises(ValueError, match="in the formats that are set"):
        proven(deep(), "bfloat16")


def test_the_first_steps_of_float16_may_be_left_out():
    """Gradients of the first loss scale, 65,536, overflow."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    net[0].weight.data.mul_(40)
    net[2].weight.data.mul_(0.01)
    assert proven(net, "float16") == "passed"
