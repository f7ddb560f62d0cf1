"""Modes of modules that a user has chosen hold in trainings and evaluations, as in a plain loop."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hybrid import Trainer, TrainSettings, split
from hybrid.networks.units import Modes
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


def nothing(model):
    pass


def compare(model, prepare, again):
    """Fit, and a loop that makes `again` of a model before every epoch; give both losses."""
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
        return found["test_loss"], float(cross_entropy(plain(x), y))


@pytest.mark.parametrize("kind", [Normed, chain])
def test_a_train_method_that_freezes_statistics_is_honored(kind):
    torch.manual_seed(0)
    model = chain(freezing(nn.Sequential)) if kind is chain else freezing(Normed)()
    ours, theirs = compare(model, nothing, nothing)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("kind", [Normed, chain])
def test_what_is_set_to_evaluation_before_a_fit_stays_so(kind):
    torch.manual_seed(0)
    ours, theirs = compare(kind(), first_norm_off, first_norm_off)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("kind", [Normed, chain])
def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained(kind):
    torch.manual_seed(0)
    ours, theirs = compare(kind(), nn.Module.eval, nothing)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_trials_run_in_the_mode_that_they_are_for():
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(5, 6)
    blocks = split(model, cuts=["b"], sample=x)
    model.train()
    out = blocks.with_bundles(x).compute_outputs(x)
    torch.testing.assert_close(out, copy.deepcopy(model).eval()(x), rtol=0, atol=0)
    assert all(m.training for m in model.modules())


def test_the_modes_of_a_model_are_read_and_left():
    model = chain()
    model[1].eval()
    modes = Modes.of(model)
    assert [path for path, flag in modes.training.items() if not flag] == ["1"]
    assert not any(modes.evaluation.values())
    assert [m.training for m in model] == [True, False, True, True, True]
