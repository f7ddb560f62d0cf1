"""Divergence: back to a checkpoint with smaller steps, a bounded number of times, and reported."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid.rounds.rounds import DivergedError, Rounds
from torch import Tensor

from hybrid import Trainer, data, models, split
from hybrid.folder.checkpoint import complete, read_manifest
from hybrid.settings.config import CheckpointSettings, OptimiserSettings, TrainSettings
from solvers import AugmentedLagrangian, Backprop, Block, BlockADMM, Solver

EVERY = 11
"""Steps an epoch."""
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"solver": Backprop()},
    "gaps filled": {
        "solver": AugmentedLagrangian(),
        "correction": Backprop(micro_batches=2),
        "sweeps": 0,
        "fill": True,
    },
    "windows": {"solver": AugmentedLagrangian(), "window": 4},
    "kept": {"solver": BlockADMM(rho=0.1), "window": "all", "correct_every": 0},
}


@pytest.fixture(scope="module")
def digits() -> tuple[data.Dataset, data.Dataset]:
    train, test = data.load("digits")
    return train.take(EVERY * 32), test


def make(out: Path | None, way: str = "serial", **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = models.build("resnet8", classes=10, channels=1, image_size=8)
    settings = {"checkpoint": CheckpointSettings(keep_last=0)} | settings
    train = TrainSettings(batch_size=32, threads=1)
    cut = split(model, 2, balance="operations")
    return Trainer(cut, train=train, out=out, quiet=True, **WAYS[way], **settings)


def poison(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    """From the second epoch on, weights become NaN while a kind of step is over its limit."""
    plain = Rounds.run

    def run(self: Rounds, windows: Any, first_step: int, epoch: int, *ends: bool) -> Any:
        rates = self.block.rates
        if epoch and self.block.last and any(rates[k] > limits[k] for k in limits):
            with torch.no_grad():
                next(self.block.module.parameters()).fill_(float("nan"))
        return plain(self, windows, first_step, epoch, *ends)

    monkeypatch.setattr(Rounds, "run", run)


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.blocks.model.state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_serial_training_goes_back_and_on_with_half_the_step(digits, tmp_path, monkeypatch) -> None:
    poison(monkeypatch, exact=0.5)
    trainer = make(tmp_path / "run")
    trainer.fit(*digits, epochs=3)
    (told,) = summary(tmp_path / "run")["rollbacks"]
    assert told["to"] == told["step"] == EVERY
    assert told["rates"] == {"exact": 0.5, "local": 0.5}
    assert "not finite" in told["reason"]
    assert all(bool(t.isfinite().all()) for t in weights(trainer).values())
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    back = [i for i, line in enumerate(lines) if line["phase"] == "rollback"]
    assert [lines[i]["step"] for i in back] == [EVERY]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps), "what was logged after the checkpoint is forgotten"


@pytest.mark.parametrize("way", ["gaps filled", "windows"])
def test_local_steps_are_halved_first(way: str, digits, tmp_path, monkeypatch) -> None:
    expected = [{"exact": 1.0, "local": 0.5}, {"exact": 0.5, "local": 0.25}]
    for kind, needed in (("local", 1), ("exact", 2)):
        run = tmp_path / kind
        with monkeypatch.context() as patched:
            poison(patched, **{kind: 0.5})
            make(run, way).fit(*digits, epochs=2)
        assert [told["rates"] for told in summary(run)["rollbacks"]] == expected[:needed]


def test_a_checkpoint_that_leads_to_divergence_again_gives_way_to_the_one_before(
    digits, tmp_path, monkeypatch
) -> None:
    poison(monkeypatch, exact=0.25)
    make(tmp_path / "run").fit(*digits, epochs=3)
    told = summary(tmp_path / "run")["rollbacks"]
    assert [one["to"] for one in told] == [EVERY, 0]
    assert [read_manifest(f)["step"] for f in complete(tmp_path / "run" / "checkpoints")] == [
        *(0, EVERY, 2 * EVERY, 3 * EVERY)
    ]


def test_a_run_that_is_resumed_with_a_hopeless_rate_loses_no_checkpoint(digits, tmp_path) -> None:
    make(tmp_path / "run").fit(*digits, epochs=2)
    before = [path.name for path in complete(tmp_path / "run" / "checkpoints")]
    hopeless = make(tmp_path / "run", resume=True, optimiser=OptimiserSettings(lr=1e12))
    with pytest.raises(DivergedError, match="3 roll-backs did not help"):
        hopeless.fit(*digits, epochs=4)
    assert [path.name for path in complete(tmp_path / "run" / "checkpoints")] == before


@pytest.mark.parametrize("allowed", [0, 2])
def test_roll_backs_are_bounded_and_the_reason_says_what_was_tried(
    allowed: int, digits, tmp_path, monkeypatch
) -> None:
    poison(monkeypatch, exact=0.0)
    trainer = make(tmp_path / "run", checkpoint=CheckpointSettings(rollbacks=allowed, keep_last=0))
    tried = f"{allowed} roll-backs did not help; " if allowed else ""
    remedy = r"the last good checkpoint is .*; lower --lr \(now 0.1\) or set correction.clip_norm"
    with pytest.raises(DivergedError, match=f"not finite .*; {tried}{remedy}"):
        trainer.fit(*digits, epochs=3)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert complete(tmp_path / "run" / "checkpoints")


def test_without_a_run_folder_there_is_nothing_to_go_back_to(digits, monkeypatch) -> None:
    poison(monkeypatch, exact=0.0)
    with pytest.raises(DivergedError, match=r"not finite .*; lower --lr"):
        make(None).fit(*digits, epochs=3)


@pytest.mark.parametrize("way", WAYS)
def test_going_back_is_going_on_as_a_resumed_run_would(way, digits, tmp_path, monkeypatch) -> None:
    """A roll-back with the old step sizes gives the bits of an undisturbed run."""
    whole = make(tmp_path / "whole", way)
    whole.fit(*digits, epochs=3)
    import hybrid.training.recovery

    def unchanged(run: Any) -> None:
        """Steps keep their size."""

    monkeypatch.setattr(hybrid.training.recovery, "set_rates", unchanged)
    failed: set[int] = set()
    plain = hybrid.rounds.rounds._check_finite

    def diverging(everyone: Any, first_step: int, epoch: int) -> None:
        plain(everyone, first_step, epoch)
        rank = threading.get_ident()
        if epoch == 2 and rank not in failed:
            failed.add(rank)
            raise DivergedError("the loss is not finite, for once")

    monkeypatch.setattr(hybrid.rounds, "_check_finite", diverging)
    again = make(tmp_path / "run", way)
    again.fit(*digits, epochs=3)
    assert len(summary(tmp_path / "run")["rollbacks"]) == 1
    assert_same(weights(again), weights(whole))


def test_a_run_killed_after_a_roll_back_resumes_to_the_bits_of_one_that_was_not(
    digits, tmp_path, monkeypatch
) -> None:
    class Fragile(Backprop):
        """Diverges in the third epoch, unless it steps at half the rate."""

        def train(self, block: Block, links: Any, window: Any, fill: Any = None) -> Any:
            stats = super().train(block, links, window, fill)
            late = window.batches[0].learning_rate < 0.06
            if block.last and late and block.rates["exact"] == 1.0:
                stats.losses[-1] = torch.tensor(float("inf"))
            return stats

    def trainer(out: Path, resume: bool = False) -> Trainer:
        solver: Solver = Fragile()
        made = make(out, resume=resume)
        made.solver, made.correction = solver, solver  # type: ignore[assignment]
        return made

    whole = trainer(tmp_path / "whole")
    whole.fit(*digits, epochs=4)
    assert len(summary(tmp_path / "whole")["rollbacks"]) == 1
    expected = {name: value.clone() for name, value in weights(whole).items()}
    for kept in (4, 3):  # after the roll-back, and just before
        run = tmp_path / f"run{kept}"
        shutil.copytree(tmp_path / "whole", run)
        for folder in complete(run / "checkpoints")[kept:]:
            shutil.rmtree(folder)
        resumed = trainer(run, resume=True)
        resumed.fit(*digits, epochs=4)
        assert_same(weights(resumed), expected)
        assert summary(run)["rollbacks"] == summary(tmp_path / "whole")["rollbacks"]


def test_on_several_ranks_a_hopeless_run_ends_with_one_line(world, tmp_path) -> None:
    flags = ("--lr", "1e9", "--set", "data.limit=128", "--out", tmp_path / "run")
    status, out, err = world.hybrid(2, "train", *flags)
    assert status == 1
    said = [line for line in err.splitlines() if "hybrid: error:" in line]
    assert len(said) == 1
    assert "3 roll-backs did not help" in said[0]
    assert out.count("going on from the checkpoint of step 0") == 3
