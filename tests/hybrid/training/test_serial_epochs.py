"""The first epochs, or a part of one, in serial rounds alone."""

from functools import cache
from typing import Any

import pytest
import torch
from answers import output
from trainings import (
    BATCH,
    assert_same,
    digits,
    interrupted,
    lines,
    refused,
    spans,
    trained_weights,
    trainer,
    weights,
)

from hybrid.settings.config import LinkSettings, OptimizerSettings, RoundSettings
from hybrid.solvers import (
    DDG,
    FDG,
    PDASGD,
    AugmentedLagrangian,
    AuxNet,
    Backprop,
    BlockADMM,
    FeaturesReplay,
    LocalUpdates,
    Penalty,
    Petra,
)

BATCHES = 4
WINDOWS: dict[str, Any] = {"window": 2}
KEPT: dict[str, Any] = {"window": "all", "correct_every": 0}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddg": (DDG(micro_batches=4), {}),
    "fdg": (FDG(), {}),
    "features replay": (FeaturesReplay(micro_batches=2), {}),
    "petra": (Petra(micro_batches=4), {"model": "revnet8"}),
    "pd-asgd": (PDASGD(), {}),
    "local updates": (LocalUpdates(), {}),
    "gaps": (AugmentedLagrangian(), {}),
    "gaps and windows": (Penalty(), WINDOWS | {"fill": True}),
    "windows": (BlockADMM(rho=0.1), WINDOWS),
    "uncorrected": (BlockADMM(rho=0.1), WINDOWS | {"correct_every": 0}),
    "kept": (BlockADMM(rho=0.1), KEPT),
    "auto": (AugmentedLagrangian(), {"window": "auto", "window_limit": 2}),
    "auxnet": (AuxNet(), WINDOWS),
}


@pytest.fixture(scope="module")
def few():
    return digits(BATCHES)


@pytest.fixture(scope="module")
def exact(few, tmp_path_factory):
    """The weights of back-propagation in so many parts, after one epoch and after two."""
    root = tmp_path_factory.mktemp("exact")

    @cache
    def of(parts, model):
        run = root / f"{model} {parts}"
        after = trained_weights(trainer(Backprop(micro_batches=parts), run, model=model), few)
        interrupted(run, after=1)
        return weights(run), after

    return of


@pytest.mark.parametrize("way", WAYS)
def test_serial_epochs_are_back_propagation_and_what_follows_is_not(way, few, exact, tmp_path):
    (solver, settings), run = WAYS[way], tmp_path / "run"
    settings = {"model": "plain", **settings}
    made = trainer(solver, run, serial_epochs=1, **settings)
    whole = trained_weights(made, few)
    interrupted(run, after=1)
    first, after = exact(made.correction.micro_batches, settings["model"])
    assert_same(weights(run), first)
    assert not all(torch.equal(whole[name], after[name]) for name in whole)
    assert [line["phase"] for line in lines(run) if line["epoch"] == 0] == ["serial"]


def test_a_part_of_an_epoch_ends_with_the_round_that_it_ends_in(few, tmp_path):
    rounds = {"window": 1, "correct_every": 4, "serial_epochs": 0.3}
    trainer(DDG(), tmp_path / "run", **rounds).fit(*few)
    # two steps of eight, and of the six that are left the first and the fifth
    assert spans(tmp_path / "run") == {"serial": 4, "parallel": 4}


def test_ranks_of_mpirun_and_of_the_virtual_clock_begin_as_threads_do(few, world, tmp_path):
    parts, first = "solver.micro_batches=4", "rounds.serial_epochs=1"
    flags = ("--solver", "ddg", "--set", parts, "--set", first)
    fixed = ("--batch-size", BATCH, "--epochs", 2, "--set", "train.threads=1")
    size = ("--set", f"data.limit={BATCHES * BATCH}", "--set", "checkpoint.keep_last=0")
    output(world.hybrid(2, "train", *flags, *fixed, *size, "--out", tmp_path / "run"))
    solver, _ = WAYS["ddg"]
    threads = trained_weights(trainer(solver, serial_epochs=1), few)
    assert_same(weights(tmp_path / "run"), threads)
    virtual = LinkSettings(kind="virtual")
    assert_same(trained_weights(trainer(solver, serial_epochs=1, links=virtual), few), threads)


@pytest.mark.parametrize(
    ("solver", "epochs", "settings"),
    [
        (DDG(), 2, {}),
        (DDG(), 1.6, {"window": 2, "correct_every": 2}),
        (AugmentedLagrangian(), 1.3, {}),
        (AugmentedLagrangian(), 1.6, {"window": "auto", "window_limit": 2}),
        (BlockADMM(rho=0.1), 1.1, KEPT),
    ],
    ids=str,
)
def test_epochs_that_leave_the_method_nothing_are_refused(solver, epochs, settings, few):
    said = refused(trainer(solver, serial_epochs=epochs, **settings), few)
    assert said.startswith(
        f"rounds.serial_epochs is {float(epochs)}, which works only where a round"
    )


@pytest.mark.parametrize(
    ("solver", "epochs", "settings"),
    [
        (DDG(micro_batches=4), 1.5, {"window": 1, "correct_every": 4}),
        (AugmentedLagrangian(), 1.5, {"window": "auto", "window_limit": 2}),
        (BlockADMM(rho=0.1), 1, KEPT),
    ],
    ids=str,
)
def test_epochs_that_leave_it_one_round_are_not(solver, epochs, settings, few, tmp_path):
    made = trainer(solver, tmp_path / "run", serial_epochs=epochs, model="plain", **settings)
    made.fit(*few)
    assert spans(tmp_path / "run")["parallel"] == 1


def test_a_share_is_as_many_steps_as_it_looks():
    assert 0.07 * 100 > 7
    assert RoundSettings(serial_epochs=0.07).serial_steps(100) == 7
    assert RoundSettings(serial_epochs=0.25).serial_steps(10) == 3
    assert RoundSettings(serial_epochs=1e-9).serial_steps(10) == 1
    assert RoundSettings().serial_steps(10) == 0


def test_a_loss_that_diverges_in_a_serial_epoch_has_the_remedy_of_serial_steps(few):
    fast = OptimizerSettings(lr=1e12)
    said = refused(trainer(DDG(), serial_epochs=1, optimizer=fast), few)
    assert "at serial step" in said
    assert "set correction.clip_norm" in said
