"""Modes of modules that a user has chosen hold in trainings and evaluations, as in a plain loop."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hybrid import Trainer, TrainSettings, split
from hybrid.solvers import Backprop


class Normed(nn.Module):
    """Two normalized layers, cut between calls, which tells the mode of its outermost module."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.b, self.other, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.norm(self.a(x)))
        x = self.out(torch.tanh(self.other(self.b(x))))
        return x if self.training else 2 * x


def freezing(kind):
    """A class whose `train` leaves the first BatchNorm in evaluation mode."""

    class Frozen(kind):
        def train(self, mode=True):
            super().train(mode)
            next(m for m in self.modules() if isinstance(m, nn.BatchNorm1d)).eval()
            return self

    return Frozen


def chain(kind=nn.Sequential):
    return kind(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def first_norm_off(model):
    next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)).eval()


def compare(model, prepare, again):
    """Fit, and a loop that makes `again` of a model before every epoch: the same bits."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    norm.running_mean.uniform_()
    plain, cut = copy.deepcopy(model), "3" if isinstance(model, nn.Sequential) else "b"
    blocks = split(model, cuts=[cut], sample=x[:4])
    prepare(model)
    before = [m.training for m in model.modules()]
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain.train()
        again(plain)
        for i in range(0, 64, 8):
            sgd.zero_grad()
            cross_entropy(plain(x[i : i + 8]), y[i : i + 8]).backward()
            sgd.step()
    made = Trainer(
        blocks,
        Backprop(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schedule={"name": "constant", "warmup_steps": 0},
        train=TrainSettings(epochs=2, batch_size=8, threads=1),
        quiet=True,
    )
    found = made.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8), (x, y))
    assert [m.training for m in model.modules()] == before
    ours, theirs = model.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    plain.eval()
    with torch.no_grad():
        expected = float(cross_entropy(plain(x), y))
    assert found["test_loss"] == pytest.approx(expected, rel=1e-6)


def leave(model):
    pass


WAYS = {
    "a train method that freezes statistics": (freezing, leave, leave),
    "a module in evaluation mode": (lambda kind: kind, first_norm_off, first_norm_off),
    "a whole model in evaluation mode": (lambda kind: kind, nn.Module.eval, leave),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Normed, nn.Sequential])
def test_modes_hold_as_in_a_plain_loop(kind, way):
    torch.manual_seed(0)
    changed, prepare, again = WAYS[way]
    made = changed(kind)
    compare(chain(made) if kind is nn.Sequential else made(), prepare, again)
