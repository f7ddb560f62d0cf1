"""Betas that follow the activations' energy or the residuals: after a resume as without one."""

import shutil
from typing import Any

import pytest
from trainings import BATCH, digests, digits, interrupted, lines, trainer

from hybrid.folder import checkpoint
from hybrid.settings.config import CheckpointSettings
from solvers import AugmentedLagrangian, Penalty
from solvers.exact.exact_pass import PassSettings

ENERGY: dict[str, Any] = {"beta": 0.1, "beta_unit": "energy"}
BALANCED: dict[str, Any] = {"beta": 0.1, "lam_step": 0.3, "balance_ratio": 1.2}
BOTH: dict[str, Any] = ENERGY | BALANCED
STEPS: dict[str, Any] = {"lam_move": "step"}

# two mini-batches beside the one that is recorded: energies are measured at every third
GAPS: dict[str, Any] = {
    "correction": PassSettings(micro_batches=4),
    "gaps": [(2 * BATCH, 0), (0, 2 * BATCH)],
}
WINDOWS: dict[str, Any] = {"window": 2, "sweeps": 2}
KEPT: dict[str, Any] = {"window": "all", "sweeps": 2, "correct_every": 0}

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "energy in gaps of their own": (AugmentedLagrangian(**ENERGY), GAPS | {"fill_step": "own"}),
    "balanced, corrected rarely": (Penalty(**BALANCED), WINDOWS | {"correct_every": 2}),
    "both": (AugmentedLagrangian(**BOTH, **STEPS), WINDOWS),
    "both, kept": (AugmentedLagrangian(**BOTH, **STEPS), KEPT),
}
BETAS = ("program/factor", "program/energy", "fill/record energies")


@pytest.fixture(scope="module")
def few():
    """Five mini-batches."""
    return digits(5)


def made(way, out, **settings):
    """A training with a checkpoint after every report: windows of two, gaps of four."""
    solver, rounds = WAYS[way]
    often = CheckpointSettings(keep_last=0, minutes=1e-9)
    settings = {"model": "plain", "checkpoint": often, **rounds, **settings}
    return trainer(solver, out, train={"report_every": 1}, **settings)


def betas(folder):
    """What a checkpoint has of them."""
    manifest = checkpoint.read_manifest(folder)
    states = [checkpoint.load_state(folder, manifest, name) for name in manifest["states"]]
    return [x for state in states for k in BETAS if k in state for x in state[k].flatten().tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(way, few, tmp_path):
    whole = tmp_path / "whole"
    made(way, whole).fit(*few)
    folders = checkpoint.complete(whole / "checkpoints")[1:-1]
    assert any(beta != 1 for folder in folders for beta in betas(folder))
    for after, folder in [*enumerate(folders, 1)][::3]:
        run = tmp_path / folder.name
        shutil.copytree(whole, run)
        interrupted(run, after)
        made(way, run, resume=True).fit(*few)
        assert digests(run) == digests(whole)
        assert lines(run) == lines(whole)
