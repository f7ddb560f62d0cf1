"""Resuming on other blocks, and between threads and MPI, with what a solver keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid import Trainer, data, models, split
from hybrid.folder import checkpoint
from hybrid.settings.config import CheckpointSettings, TrainSettings
from hybrid.training.run import Run
from solvers import BlockADMM, Penalty

SAMPLES, BATCH = 256, 32
FLAGS = (
    *("--solver", "block-admm", "--window", "all", "--epochs", "2", "--batch-size", BATCH),
    *("--set", "rounds.correct_every=0", "--set", f"data.limit={SAMPLES}"),
    *("--set", "train.threads=1", "--set", "checkpoint.keep_last=0"),
)


@pytest.fixture(scope="module")
def digits() -> tuple[data.Dataset, data.Dataset]:
    train, test = data.load("digits")
    return train.take(SAMPLES), test


def make(out: Path, cuts: list[str], resume: bool = False) -> Trainer:
    torch.manual_seed(0)
    model = models.build("resnet8", classes=10, channels=1, image_size=8)
    return Trainer(
        split(model, cuts=cuts) if cuts else split(model, 1),
        BlockADMM(rho=0.1, balance_ratio=1.01),
        window="all",
        correct_every=0,
        train=TrainSettings(batch_size=BATCH, threads=1, evaluate_every=9),
        checkpoint=CheckpointSettings(keep_last=0),
        out=out,
        resume=resume,
        quiet=True,
    )


def resumed(
    run: Path, cuts: list[str], digits: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, dict[str, Tensor]]:
    """What the solvers hold at each cut when a resumed run is about to go on."""
    held: dict[str, dict[str, Tensor]] = {}

    def look(self: Run) -> dict[str, Any]:
        mine = self.rounds.solver
        assert isinstance(mine, Penalty)
        for cut, names in zip(
            ["", *self.blocks.cuts, ""][self.links.rank :][:2],
            (("lam", "kappa_in"), ("target", "kappa_out")),
            strict=True,
        ):
            held.setdefault(cut, {}).update(mine._store.state(list(names)))
        return {}

    with monkeypatch.context() as patched:
        patched.setattr(Run, "fit", look)
        make(run, cuts, resume=True).fit(*digits, epochs=2)
    return held


def test_kept_variables_follow_their_cuts_to_any_number_of_blocks(
    digits, tmp_path, monkeypatch
) -> None:
    run, cuts = tmp_path / "run", ["layer1.0", "layer2.0"]
    make(run, cuts).fit(*digits, epochs=2)
    shutil.rmtree(checkpoint.complete(run / "checkpoints")[-1])
    folder = checkpoint.complete(run / "checkpoints")[-1]
    manifest = checkpoint.read_manifest(folder)
    kept = {cut: checkpoint.load_kept(folder, manifest, f"cut before {cut}") for cut in cuts}
    assert float(kept["layer2.0"]["rho"]) != 0.1
    others = [[], ["layer2.0"], cuts, ["layer1.0", "layer2.0", "layer3.0"], ["layer3.0"]]
    for other in others:
        held = resumed(run, other, digits, monkeypatch)
        for cut in other:
            if cut not in kept:
                assert held[cut] == {}, "it begins with a forward pass"
                continue
            assert torch.equal(held[cut]["lam"], kept[cut]["lam"])
            assert torch.equal(held[cut]["target"], kept[cut]["lam"])
            assert torch.equal(held[cut]["kappa_in"], kept[cut]["kappa_in"])
            assert torch.equal(held[cut]["kappa_out"], kept[cut]["kappa_in"])
    went_on = tmp_path / "went-on"
    for other in others:
        shutil.rmtree(went_on, ignore_errors=True)
        shutil.copytree(run, went_on)
        make(went_on, other, resume=True).fit(*digits, epochs=2)
        newest = checkpoint.read_manifest(checkpoint.complete(went_on / "checkpoints")[-1])
        assert newest["cuts"] == other
        assert [name.split()[-1] for name in newest["kept"]] == other
        assert newest["totals"][0]["images"] == 2 * SAMPLES


def test_a_run_of_threads_goes_on_under_mpirun_and_back_with_the_same_bits(
    world, hybrid, tmp_path
) -> None:
    whole, threads, ranks = (tmp_path / name for name in ("whole", "threads", "ranks"))
    assert hybrid("train", *FLAGS, "--blocks", 2, "--out", whole)[0] == 0
    shutil.copytree(whole, threads)
    shutil.rmtree(checkpoint.complete(threads / "checkpoints")[-1])
    shutil.copytree(threads, ranks)
    status, _, err = world.hybrid(2, "train", "--resume", "--out", ranks)
    assert status == 0, err
    wanted = files(whole)
    assert files(ranks) == wanted
    # back: the ranks' own first checkpoint, gone on with by threads
    shutil.rmtree(ranks)
    assert world.hybrid(2, "train", *FLAGS, "--out", ranks)[0] == 0
    shutil.rmtree(checkpoint.complete(ranks / "checkpoints")[-1])
    assert hybrid("train", "--resume", "--out", ranks)[0] == 0
    assert files(ranks) == wanted


def files(run: Path) -> dict[str, str]:
    """SHA-256 of every file of the newest checkpoint."""
    body = json.loads((checkpoint.complete(run / "checkpoints")[-1] / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in (body["units"] | body["kept"]).items()}
