"""The first epochs, or a part of one, in serial rounds alone."""

from functools import cache
from typing import Any

import pytest
import torch
from trainings import (
    assert_same,
    digits,
    interrupted,
    lines,
    spans,
    trained_weights,
    trainer,
    weights,
)

from hybrid.settings.config import RoundSettings
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
    "waits": (DDG(micro_batches=4), {"fill": AugmentedLagrangian(), "waits": [(4, 0), (0, 8)]}),
    "penalty": (Penalty(), WINDOWS),
    "windows": (BlockADMM(rho=0.1), WINDOWS),
    "uncorrected": (BlockADMM(rho=0.1), WINDOWS | {"correct_every": 0}),
    "kept": (BlockADMM(rho=0.1), KEPT),
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
    first, after = exact(solver.num_micro_batches(32, len(made.blocks)), settings["model"])
    assert_same(weights(run), first)
    assert not all(torch.equal(whole[name], after[name]) for name in whole)
    assert [line["phase"] for line in lines(run) if line["epoch"] == 0] == ["serial"]


def test_a_part_of_an_epoch_ends_with_the_round_that_it_ends_in(few, tmp_path):
    rounds = {"window": 1, "correct_every": 4, "serial_epochs": 0.3}
    trainer(DDG(), tmp_path / "run", **rounds).fit(*few)
    # two steps of eight, and of the six that are left the first and the fifth
    assert spans(tmp_path / "run") == {"serial": 4, "parallel": 4}


def test_a_share_is_as_many_steps_as_it_looks():
    assert 0.07 * 100 > 7
    assert RoundSettings(serial_epochs=0.07).serial_steps(100) == 7
    assert RoundSettings(serial_epochs=0.25).serial_steps(10) == 3
    assert RoundSettings(serial_epochs=1e-9).serial_steps(10) == 1
    assert RoundSettings().serial_steps(10) == 0
