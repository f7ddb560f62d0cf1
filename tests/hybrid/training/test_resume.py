"""A run that was interrupted at any checkpoint ends with the bits of an undisturbed one."""

import shutil
from typing import Any

import pytest
from trainings import (
    BATCH,
    OFTEN,
    assert_same,
    digests,
    digits,
    interrupted,
    lines,
    newest,
    trained_weights,
    trainer,
)

from hybrid.folder import checkpoint
from hybrid.settings.config import LinkSettings, OptimizerSettings
from hybrid.solvers import DDG, AugmentedLagrangian, AuxNet, Backprop, BlockADMM, Penalty
from hybrid.solvers.exact.exact_pass import PassSettings

ALONE: dict[str, Any] = {"correct_every": 0}
KEPT: dict[str, Any] = {"window": "all", "correct_every": 0}
WINDOWS: dict[str, Any] = {"window": 2, "sweeps": 2}
# two mini-batches beside the one that is recorded: energies are measured at every third
GAPS: dict[str, Any] = {
    "correction": PassSettings(micro_batches=4),
    "gaps": [(2 * BATCH, 0), (0, 2 * BATCH)],
    "fill_step": "own",
}
ENERGY: dict[str, Any] = {"beta": 0.1, "beta_unit": "energy"}
BALANCED: dict[str, Any] = {"beta": 0.1, "lam_step": 0.3, "balance_ratio": 1.2}
ADMM: dict[str, Any] = {"rho": 0.1, "balance_ratio": 1.5}
FOLLOWING = AugmentedLagrangian(**ENERGY | BALANCED, lam_move="step")


def torch_optimizer(name, **arguments):
    return {"optimizer": OptimizerSettings(name=name, lr=0.01, arguments=arguments)}


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "carried": (BlockADMM(**ADMM, storage="bfloat16", filter=2), KEPT | {"model": "resnet8"}),
    "carried, corrected rarely": (
        BlockADMM(**ADMM, order="gauss-seidel"),
        {"window": "all", "correct_every": 2, "sweeps": 2},
    ),
    "auxiliary networks": (AuxNet(), ALONE),
    "auxiliary networks, the whole set": (AuxNet(), KEPT),
    "energy in gaps": (AugmentedLagrangian(**ENERGY), GAPS),
    "balanced, corrected rarely": (Penalty(**BALANCED), WINDOWS | {"correct_every": 2}),
    "energy, balanced": (FOLLOWING, WINDOWS),
    "energy, balanced and carried": (FOLLOWING, KEPT | {"sweeps": 2}),
    "serial epochs": (DDG(micro_batches=4), {"serial_epochs": 1.5}),
    "serial epochs, carried": (BlockADMM(rho=0.1), KEPT | {"serial_epochs": 1.5}),
    "auto": (
        AugmentedLagrangian(),
        {"window": "auto", "window_limit": 4, "residual_limit": 0.2, "sweeps": 2},
    ),
    "RMSprop": (Backprop(), torch_optimizer("RMSprop", centered=True, momentum=0.5)),
    "NAdam without a stash": (
        DDG(micro_batches=2, stash=False),
        torch_optimizer("nadamw") | {"model": "resnet8"},
    ),
    "Muon, extrapolated": (
        DDG(micro_batches=2),
        torch_optimizer("muon") | {"delay": "extrapolate", "model": "resnet8"},
    ),
    "Adafactor": (Backprop(), torch_optimizer("Adafactor")),
    "an average": (Backprop(), {"train": {"ema": 0.8}}),
    "an average of local steps": (
        AugmentedLagrangian(momentum=0.5),
        {"fill_step": "own", "train": {"ema": 0.8}},
    ),
    "an average of late gradients": (DDG(), {"train": {"ema": 0.8}}),
}
BETAS = ("program/factor", "program/energy", "fill/record energies")


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
        if way.startswith("energy"):
            assert any(beta != 1 for beta in betas(newest(run))) or after == 1
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


def betas(folder):
    """The factors of beta that a checkpoint has."""
    manifest = checkpoint.read_manifest(folder)
    states = [checkpoint.load_state(folder, manifest, name) for name in manifest["states"]]
    return [x for state in states for k in BETAS if k in state for x in state[k].flatten().tolist()]
