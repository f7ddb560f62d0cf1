"""A small network, its samples, and trainings of it with the proof looked at."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from trainings import trainer_of

N, BATCH = 52, 26
Solved = tuple[Any, dict[str, Any]]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(N, 6, generator=random)
    return x, torch.randint(3, (N,), generator=random)


class Residual(nn.Module):
    """Two tensors cross its cut, a weight is used twice, and it draws, normalizes and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.passes = nn.Linear(6, 3), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 0.5
        h = torch.tanh(self.norm(self.first(x)))
        skip = F.dropout(h, 0.3, self.training)
        for layer in self.layers:
            h = torch.tanh(layer(h)) * (1 + 0.1 * self.passes)
        return self.head(h + 2 * skip + F.linear(h, self.first.weight))


def network(kind: str) -> tuple[nn.Module, list[str]]:
    torch.manual_seed(1)
    if kind == "calls":
        return Residual(), ["layers.1"]
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 3)), ["4"]


def weights(kind: str, solver: Any, verify: str = "always", **more: Any) -> dict[str, Any]:
    """The network after two epochs; the proof is looked at."""
    model, cuts = network(kind)
    train = {"batch_size": BATCH, "verify": verify, **more.pop("train", {})}
    made = trainer_of(
        model, solver, cuts=cuts, sample=samples()[0][:4], metrics={}, train=train, **more
    )
    summary = made.fit(samples())
    assert summary["proof"] == ("passed" if verify != "never" else "skipped: train.verify is never")
    return dict(model.state_dict())
