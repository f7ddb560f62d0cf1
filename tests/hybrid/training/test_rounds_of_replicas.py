"""Rounds of replicas that differ in between, over the epochs of a whole run."""

import pytest
import torch
from torch import nn
from trainings import assert_same, digits, fitted, interrupted, trainer

from hybrid import OptimizerSettings, Trainer, TrainSettings, split
from hybrid.settings.config import CheckpointSettings
from solvers import Backprop
from solvers.sync.diloco import DiLoCo, DiLoCoSync
from solvers.sync.hpsgd import HPSGD
from solvers.sync.local_sgd import LocalSGD

STEPS = 4
"""An epoch."""


@pytest.fixture(scope="module")
def few():
    return digits(STEPS)


@pytest.mark.parametrize(("h", "rounds"), [(3, 2), (STEPS, 2), (6, 1), (9, 0)])
def test_outer_steps_are_taken_after_h_steps_and_not_at_an_epochs_end(h, rounds, few, monkeypatch):
    landed = []
    land = DiLoCoSync._land

    def noted(sync):
        landed.append(sync.count)
        land(sync)

    monkeypatch.setattr(DiLoCoSync, "_land", noted)
    fitted(trainer(Backprop(), blocks=1, replicas=2, sync=DiLoCo(steps=h)), few)
    assert sorted(landed) == sorted([h * n for n in range(1, rounds + 1)] * 2)


@pytest.mark.parametrize(
    "sync",
    [LocalSGD(steps=3), DiLoCo(steps=6, lag=1), HPSGD(steps=3, lag=2)],
    ids=["local-sgd", "diloco", "hpsgd"],
)
def test_an_evaluation_and_a_checkpoint_within_a_round_change_nothing(sync, few, tmp_path):
    settings = {"replicas": 2, "sync": sync}
    seldom = fitted(trainer(Backprop(), train={"evaluate_every": 2}, **settings), few)
    often = trainer(Backprop(), tmp_path / "run", **settings)
    assert_same(fitted(often, few), seldom)


def test_a_run_refuses_an_optimizer_that_its_rounds_cannot_step(few, tmp_path):
    out = tmp_path / "run"
    adaptive = OptimizerSettings(name="adamw", lr=1e-3)
    made = trainer(Backprop(), out, replicas=2, sync=HPSGD(), optimizer=adaptive)
    with pytest.raises(ValueError, match=r"the optimizer is AdamW, and sync\.name 'hpsgd'"):
        made.fit(*few)
    assert not out.exists()


def test_a_mean_of_what_no_optimizer_keeps_is_refused(few):
    plain = OptimizerSettings(momentum=0.0)
    sync = LocalSGD(optimizer_state="mean")
    made = trainer(Backprop(), replicas=2, sync=sync, optimizer=plain)
    with pytest.raises(
        ValueError, match=r"sync\.optimizer_state is 'mean', .* only where the optimizer"
    ):
        made.fit(*few)


def test_the_network_is_left_as_it_was_tested(few):
    """Within a round: the mean of the replicas, of which the summary tells the accuracy."""
    made = trainer(Backprop(), blocks=1, replicas=2, sync=LocalSGD(steps=100))
    tested = made.fit(*few)["test_accuracy"]
    model = made.blocks.model.eval()
    ids = torch.arange(len(few[1]))
    found = model(few[1].batch(ids, seed=0, epoch=0, augment=False)).argmax(1)
    assert (found == few[1].targets(ids)).double().mean().item() == pytest.approx(tested)


class Scaled(nn.Module):
    """One number for all, as a temperature is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    "sync", [LocalSGD(steps=3), DiLoCo(steps=6, lag=1)], ids=["local", "outer"]
)
def test_a_resume_keeps_each_replicas_momentum_of_a_number_too(sync, few, tmp_path):
    def made(resume):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(64, 16), Scaled(), nn.ReLU(), nn.Linear(16, 10)
        settings = TrainSettings(epochs=4, batch_size=32, threads=1)
        kept = CheckpointSettings(keep_last=0)
        return Trainer(
            split(nn.Sequential(*layers), 1),
            Backprop(),
            replicas=2,
            sync=sync,
            train=settings,
            checkpoint=kept,
            out=tmp_path / "run",
            resume=resume,
            quiet=True,
        )

    expected = {k: v.clone() for k, v in fitted(made(False), few).items()}
    interrupted(tmp_path / "run", after=2)
    assert_same(fitted(made(True), few), expected)
