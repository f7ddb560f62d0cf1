"""A regularizer, of which every block adds its own part, trains as in a plain loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import trainer_of

from hybrid.data.sampling import epoch_order
from hybrid.solvers import DDG, Backprop

N, BATCH = 40, 10


class Tied(nn.Module):
    """A weight that two blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def absolute(weights: Any) -> Any:
    return 0.05 * sum(w.abs().sum() for name, w in weights.items() if name.endswith("weight"))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "tied":
        return Tied().double()
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


@pytest.mark.parametrize("kind", ["chain", "tied"])
@pytest.mark.parametrize(
    ("solver", "more"),
    [
        (Backprop(), {}),
        (Backprop(micro_batches=3, clip_norm=0.5), {"replicas": 2}),
        (DDG(micro_batches=2), {"replicas": 3, "blocks": 1}),
    ],
    ids=["blocks", "parts and replicas, clipped", "late"],
)
def test_it_is_added_once_in_a_step(kind: str, solver: Any, more: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(N, 6, generator=random, dtype=torch.float64)
    y = torch.randint(6, (N,), generator=random)
    loop, model = network(kind), network(kind)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    for epoch in range(2):
        for ids in epoch_order(0, epoch, N).split(BATCH):
            optimizer.zero_grad()
            penalty = absolute(dict(loop.named_parameters()))
            (F.cross_entropy(loop(x[ids]), y[ids]) + penalty).backward()
            if getattr(solver, "clip_norm", 0.0):
                nn.utils.clip_grad_norm_(loop.parameters(), solver.clip_norm)
            optimizer.step()
    cuts = {"chain": ["2"], "tied": ["second"]}[kind] if "blocks" not in more else None
    made = trainer_of(
        *(model, solver, more.get("blocks")),
        cuts=cuts,
        sample=x[:4],
        regularizer=absolute,
        metrics={},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train={"batch_size": BATCH},
        **{name: value for name, value in more.items() if name != "blocks"},
    )
    assert made.fit((x, y))["proof"] == "passed"
    for name, p in loop.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], p, rtol=1e-10, atol=1e-12)
