"""An interrupted run ends with the bits of an undisturbed one; kept variables follow their cuts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from trainings import (
    OFTEN,
    assert_same,
    digests,
    digits,
    interrupted,
    lines,
    network,
    newest,
    trained_weights,
    trainer,
)

from hybrid import split
from hybrid.folder import checkpoint
from hybrid.settings.config import LinkSettings, OptimizerSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, BlockADMM, FeaturesReplay
from hybrid.training.run import Run

KEPT: dict[str, Any] = {"window": "all", "correct_every": 0}
WINDOWS: dict[str, Any] = {"window": 2, "sweeps": 2}
FILL = AugmentedLagrangian(beta=0.1)
FILLED: dict[str, Any] = {"fill": FILL, "local_budget": [(5, 0), (0, 8)]}
FOLLOWING = AugmentedLagrangian(beta=0.1, lam_step=0.3, lam_move="step")


def torch_optimizer(name, **arguments):
    return {"optimizer": OptimizerSettings(name=name, lr=0.01, arguments=arguments)}


# every solver by itself: tests/solvers/test_every_solver.py
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "carried": (BlockADMM(rho=0.1, storage="bfloat16", filter=2), KEPT | {"model": "resnet8"}),
    "carried, corrected rarely": (
        BlockADMM(rho=0.1, order="gauss-seidel"),
        {"window": "all", "correct_every": 2, "sweeps": 2},
    ),
    "waits, Muon, extrapolated": (
        FDG(micro_batches=2),
        torch_optimizer("muon") | FILLED | {"delay": "extrapolate", "model": "resnet8"},
    ),
    "waits and replays, closed": (
        FeaturesReplay(micro_batches=2),
        FILLED | {"serial_end": True, "window": 2},
    ),
    "steps of lam": (FOLLOWING, WINDOWS),
    "steps of lam, carried": (FOLLOWING, KEPT | {"sweeps": 2}),
    "serial epochs": (DDG(micro_batches=4), {"serial_epochs": 1.5}),
    "NAdam without a stash": (
        DDG(micro_batches=2, stash=False),
        torch_optimizer("nadamw") | {"model": "resnet8"},
    ),
    "Adafactor": (Backprop(), torch_optimizer("Adafactor")),
    "an average of local steps": (
        AugmentedLagrangian(momentum=0.5),
        {"window": 2, "train": {"ema": 0.8}},
    ),
    "an average of late gradients": (DDG(), {"train": {"ema": 0.8}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(way, tmp_path):
    """One of the resumed runs goes on on virtual clocks."""
    solver, settings = WAYS[way]
    train = {"epochs": 3, "report_every": 1, **settings.get("train", {})}

    def fit(out, resume, kind="threads"):
        given = {"model": "plain", **settings, "train": train, "checkpoint": OFTEN}
        links = LinkSettings(kind=kind)
        trainer(solver, out, resume=resume, links=links, **given).fit(*digits(5))

    whole = tmp_path / "whole"
    fit(whole, resume=False)
    count = len(checkpoint.complete(whole / "checkpoints"))
    for after in {1, count // 2, count - 2}:
        run = tmp_path / str(after)
        shutil.copytree(whole, run)
        interrupted(run, after)
        fit(run, resume=True, kind="virtual" if after == 1 else "threads")
        assert digests(run) == digests(whole)
        assert lines(run) == lines(whole)


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "soap"])
def test_a_run_goes_on_on_other_blocks_with_the_same_bits(optimizer, tmp_path):
    settings = {"optimizer": OptimizerSettings(name=optimizer), "train": {"ema": 0.8}}
    whole = trained_weights(trainer(Backprop(), tmp_path / "run", 2, **settings), digits(3))
    interrupted(tmp_path / "run", after=1)
    again = trainer(Backprop(), tmp_path / "run", 3, resume=True, **settings)
    assert_same(trained_weights(again, digits(3)), whole)


CUTS = ["layer1.0", "layer2.0"]
OTHERS = [[], ["layer2.0"], [*CUTS, "layer3.0"]]


@pytest.fixture(scope="module")
def few():
    return digits(4)


def make(out, cuts, resume=False):
    solver = BlockADMM(rho=0.1)
    made = trainer(solver, out, window="all", correct_every=0, resume=resume)
    made.blocks = split(network(), cuts=cuts) if cuts else split(network(), 1)
    return made


@pytest.fixture(scope="module")
def stopped(few, tmp_path_factory):
    """A run of three blocks after the first of two epochs."""
    run = tmp_path_factory.mktemp("elastic") / "run"
    make(run, CUTS).fit(*few)
    interrupted(run, after=1)
    return run


def carried(run, few, cuts, patch):
    """What the programs hold at each cut when a resumed run is about to go on."""
    held: dict[str, dict[str, Tensor]] = {}

    def look(self, notices):
        program = self.training.rounds.program
        held[self.training.files.before] = dict(program.state().cut)
        return {}

    with patch.context() as patched:
        patched.setattr(Run, "_train", look)
        make(run, cuts, resume=True).fit(*few)
    return held


@pytest.mark.parametrize("cuts", OTHERS, ids=lambda cuts: "+".join(cuts) or "one block")
def test_kept_variables_follow_their_cuts_to_any_number_of_blocks(
    cuts, stopped, few, tmp_path, monkeypatch
):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    manifest = checkpoint.read_manifest(newest(run))
    held = carried(run, few, cuts, monkeypatch)
    for cut in cuts:
        kept = checkpoint.load_state(newest(run), manifest, f"cut before {cut}")
        assert bool(kept) == (cut in CUTS)
        mine = {f"program/{name}": tensor for name, tensor in held[f"cut before {cut}"].items()}
        assert all(mine[name].equal(tensor) for name, tensor in kept.items())
    make(run, cuts, resume=True).fit(*few)
    ended = checkpoint.read_manifest(newest(run))
    assert ended["cuts"] == cuts
    assert sorted(n.split()[-1] for n in ended["states"] if n.startswith("cut")) == cuts
    assert ended["totals"][0]["images"] == 2 * len(few[0])
