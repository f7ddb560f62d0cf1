"""Buffers of one's own, which a forward pass moves and reads, move as statistics do."""

import shutil

import pytest
import torch
from torch import nn
from trainings import assert_same, digits, newest, trained_weights

from hybrid import Trainer, split
from hybrid.folder import checkpoint
from hybrid.settings.config import CheckpointSettings, TrainSettings
from hybrid.solvers import (
    DDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    FeaturesReplay,
    LocalUpdates,
    Petra,
)
from hybrid.solvers.numerics.buffers import captured_buffers, frozen_statistics, replaced_buffers
from hybrid_messages import PDASGD

STEPS = 10


class Center(nn.Module):
    """Less a running mean of its own, which moves in every second pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("unseen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        if self.training:
            self.seen += 1  # in place, unseen by autograd, and replaced
            self.unseen.data.add_(1)
            if self.seen % 2 == 0:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean) * self.mask


def trained(solver, out=None, resume=False, **settings):
    torch.manual_seed(0)
    centerd = nn.Linear(64, 16), Center(), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
    network = nn.Sequential(nn.Flatten(), *centerd, nn.Linear(16, 10))
    # in parts it moves more often than in a loop, which the proof would refuse
    train = TrainSettings(epochs=1, batch_size=8, threads=1, report_every=1, verify="never")
    made = Trainer(
        split(network, cuts=["5", "6"]),
        solver,
        train=train,
        checkpoint=CheckpointSettings(steps=1, keep_last=0),
        out=out,
        resume=resume,
        quiet=True,
        **settings,
    )
    images, test = digits(4)
    return trained_weights(made, (images.take(8 * STEPS), test))


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        (Backprop(), {}),
        (Backprop(micro_batches=1, recompute=True), {}),
        (DDG(), {}),
        (FeaturesReplay(), {}),
        (Petra(), {}),
        (PDASGD(), {}),
        (LocalUpdates(style="overlapping", chunks=2), {}),
        (DDG(), {"fill": AugmentedLagrangian(), "local_budget": [(2, 1), (2, 1), (0, 2)]}),
        (AugmentedLagrangian(), {"window": 2, "sweeps": 2}),
        (BlockADMM(), {"window": 2}),
    ],
)
def test_a_forward_pass_of_a_mini_batch_moves_them_once(solver, settings):
    """A parallel phase leaves them alone: those of a window are moved by its exact pass."""
    found = trained(solver, **settings)
    assert int(found["2.seen"]) == int(found["2.unseen"]) == STEPS


@pytest.mark.parametrize("m", [1, 4])
def test_a_pass_that_is_run_again_meets_what_the_first_one_met(m):
    for method in (Backprop, DDG):
        assert_same(trained(method(m, recompute=True)), trained(method(m)))


def test_a_buffer_of_two_modules_stays_one():
    class Mover(nn.Module):
        def __init__(self, mean):
            super().__init__()
            self.register_buffer("mean", mean)

        def forward(self, x):
            self.mean.add_(1)
            return x - self.mean

    mean = torch.zeros(3)
    module = nn.Sequential(Mover(mean), Mover(mean))
    with frozen_statistics(module):
        module(torch.ones(2, 3))
    assert module[0].mean is module[1].mean
    assert module[0].mean.tolist() == [0.0] * 3
    with captured_buffers(module) as before:
        expected = module(torch.ones(2, 3))
    with replaced_buffers(module, before):
        assert torch.equal(module(torch.ones(2, 3)), expected)


@pytest.mark.parametrize(
    "solver",
    [DDG(3), DDG(3, recompute=True), PDASGD()],
    ids=["ddg", "again", "pd"],
)
def test_what_is_under_way_keeps_what_it_has_met(solver, tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)  # or checkpoints wait for its end
    whole = tmp_path / "whole"
    expected = trained(solver, whole)
    run = shutil.copytree(whole, tmp_path / "run")
    for folder in checkpoint.complete(run / "checkpoints"):
        if int(folder.name) > 3:
            shutil.rmtree(folder)
    (run / "summary.json").unlink()
    assert 0 < int(newest(run).name) <= 3
    assert_same(trained(solver, run, resume=True), expected)
