"""Divergence: back to a checkpoint with smaller steps, a bounded number of times, and reported."""

import shutil
import threading
from typing import Any

import pytest
import torch
from trainings import assert_same, digits, lines, summary, trained_weights, trainer

from hybrid.folder.checkpoint import complete, read_manifest
from hybrid.rounds.base import Rounds
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, BlockADMM
from hybrid.training.rank_training import RankTraining

EVERY = 5
"""Steps an epoch."""
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"solver": Backprop()},
    "local work": {
        "solver": DDG(micro_batches=2),
        "fill": "augmented-lagrangian",
        "local_budget": [(4, 0), (0, 8)],
    },
    "windows": {"solver": AugmentedLagrangian(), "window": 4},
    "kept": {"solver": BlockADMM(rho=0.1), "window": "all", "correct_every": 0},
}


@pytest.fixture(scope="module")
def few():
    return digits(EVERY)


def make(out, way="serial", epochs=3, **settings):
    return trainer(**WAYS[way], out=out, model="plain", train={"epochs": epochs}, **settings)


def poison(monkeypatch, **limits):
    """From the second epoch on, weights become NaN while a kind of step is over its limit."""
    plain = Rounds.run

    def run(self, windows, first_step, epoch, ends):
        block = self.exact.block
        if epoch and block.last and any(block.rates[k] > limits[k] for k in limits):
            with torch.no_grad():
                next(block.module.parameters()).fill_(float("nan"))
        return plain(self, windows, first_step, epoch, ends)

    monkeypatch.setattr(Rounds, "run", run)


def test_serial_training_goes_back_and_on_with_half_the_step(few, tmp_path, monkeypatch):
    poison(monkeypatch, exact=0.5)
    trained = trained_weights(make(tmp_path / "run"), few)
    (told,) = summary(tmp_path / "run")["rollbacks"]
    assert told["to"] == told["step"] == EVERY
    assert told["rates"] == {"exact": 0.5, "local": 0.5}
    assert "not finite" in told["reason"]
    assert all(bool(t.isfinite().all()) for t in trained.values())
    told = lines(tmp_path / "run")
    assert [line["step"] for line in told if line["phase"] == "rollback"] == [EVERY]
    steps = [line["step"] for line in told]
    assert steps == sorted(steps), "what was logged after the checkpoint is forgotten"


@pytest.mark.parametrize("way", ["local work"])
def test_local_steps_are_halved_first(way, few, tmp_path, monkeypatch):
    expected = [{"exact": 1.0, "local": 0.5}, {"exact": 0.5, "local": 0.25}]
    for kind, needed in (("local", 1), ("exact", 2)):
        run = tmp_path / kind
        with monkeypatch.context() as patched:
            poison(patched, **{kind: 0.5})
            make(run, way, 2).fit(*few)
        assert [told["rates"] for told in summary(run)["rollbacks"]] == expected[:needed]


def test_a_checkpoint_that_leads_to_divergence_again_gives_way_to_the_one_before(
    few, tmp_path, monkeypatch
):
    poison(monkeypatch, exact=0.25)
    make(tmp_path / "run").fit(*few)
    told = summary(tmp_path / "run")["rollbacks"]
    assert [one["to"] for one in told] == [EVERY, 0]
    assert [read_manifest(f)["step"] for f in complete(tmp_path / "run" / "checkpoints")] == [
        *(0, EVERY, 2 * EVERY, 3 * EVERY)
    ]


def test_a_run_that_is_resumed_with_a_hopeless_rate_loses_no_checkpoint(few, tmp_path):
    make(tmp_path / "run", epochs=2).fit(*few)
    before = [path.name for path in complete(tmp_path / "run" / "checkpoints")]
    wild = OptimizerSettings(lr=1e12)
    hopeless = make(tmp_path / "run", epochs=4, resume=True, optimizer=wild)
    with pytest.raises(DivergedError, match="3 roll-backs did not help"):
        hopeless.fit(*few)
    assert [path.name for path in complete(tmp_path / "run" / "checkpoints")] == before


@pytest.mark.parametrize("way", WAYS)
def test_going_back_is_going_on_as_a_resumed_run_would(way, few, tmp_path, monkeypatch):
    """A roll-back with the old step sizes gives the bits of an undisturbed run."""
    whole = trained_weights(make(tmp_path / "whole", way), few)
    monkeypatch.setattr(RankTraining, "take_smaller_steps", lambda _: None)
    failed: set[int] = set()

    def diverging(rounds, windows, first_step, epoch, bn_recalibration):
        found = run(rounds, windows, first_step, epoch, bn_recalibration)
        rank = threading.get_ident()
        if epoch == 2 and rank not in failed:
            failed.add(rank)
            raise DivergedError("the loss is not finite, for once")
        return found

    run = Rounds.run
    monkeypatch.setattr(Rounds, "run", diverging)
    again = trained_weights(make(tmp_path / "run", way), few)
    assert len(summary(tmp_path / "run")["rollbacks"]) == 1
    assert_same(again, whole)


def test_a_run_killed_after_a_roll_back_resumes_to_the_bits_of_one_that_was_not(
    few, tmp_path, monkeypatch
):
    poison(monkeypatch, exact=0.5)
    whole = tmp_path / "whole"
    expected = trained_weights(make(whole, epochs=4), few)
    for kept in (4, 3):  # after the roll-back, and just before
        run = tmp_path / f"run{kept}"
        shutil.copytree(whole, run)
        for folder in complete(run / "checkpoints")[kept:]:
            shutil.rmtree(folder)
        (run / "summary.json").unlink()
        assert_same(trained_weights(make(run, epochs=4, resume=True), few), expected)
        assert summary(run)["rollbacks"] == summary(whole)["rollbacks"]


def test_a_run_without_a_folder_does_not_end_with_weights_that_its_last_step_spoilt(
    few, monkeypatch
):
    plain = Rounds.run

    def run(self, *asked):
        reports = plain(self, *asked)
        with torch.no_grad():
            next(self.exact.block.module.parameters()).fill_(float("nan"))
        return reports

    monkeypatch.setattr(Rounds, "run", run)
    with pytest.raises(
        DivergedError, match=r"^the weights are not finite after step 5; lower the learning rate"
    ):
        make(None, epochs=1).fit(*few)
