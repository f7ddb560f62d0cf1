"""Which phases run: rare corrections or none, serial epochs, and runs of another solver."""

from functools import cache
from typing import Any

import pytest
import torch
from trainings import (
    BATCH,
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
from hybrid.settings.sections.rounds import WINDOW
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    LocalUpdates,
    Penalty,
    Petra,
)
from hybrid_auxnet import AuxNet
from hybrid_messages import PDASGD

BATCHES = 4
WINDOWS: dict[str, Any] = {"window": 2}
KEPT: dict[str, Any] = {"window": "all", "correct_every": 0}
ADMM = BlockADMM(rho=0.1)


@pytest.fixture(scope="module")
def few():
    return digits(BATCHES)


@pytest.mark.parametrize(
    ("every", "window", "expected"),
    [
        (1, 2, {"serial": 4, "parallel": 4}),
        (3, 2, {"serial": 2, "propagate": 2, "parallel": 4}),
        (0, 2, {"propagate": 4, "parallel": 4}),
        (2, "all", {"serial": 1, "observe": 1, "propagate": 1, "parallel": 2}),
        (0, "all", {"propagate": 2, "parallel": 2}),
    ],
)
def test_every_nth_round_has_a_serial_phase(every, window, expected, few, tmp_path):
    trainer(ADMM, tmp_path / "run", window=window, correct_every=every).fit(*few)
    assert spans(tmp_path / "run") == expected
    found = [line["phase"] for line in lines(tmp_path / "run")]
    assert found == ["serial", "parallel", "test"] * 2


@pytest.mark.parametrize("solver", [DDG(), LocalUpdates()], ids=lambda s: s.name)
def test_a_solver_that_trains_alone_takes_turns_with_serial_rounds(few, tmp_path, solver):
    rounds = {"window": 1, "correct_every": 2}
    summary = trainer(solver, tmp_path / "run", **rounds).fit(*few)
    assert spans(tmp_path / "run") == {"serial": 4, "parallel": 4}
    trained = [line["samples"] for line in lines(tmp_path / "run") if "samples" in line]
    assert sum(trained) == 2 * BATCH * BATCHES
    assert summary["images_per_second"] == pytest.approx(
        sum(trained) / summary["train_seconds"], rel=1e-6
    )


@pytest.mark.parametrize(("solver", "settings"), [(Penalty(), KEPT), (Backprop(), {})])
def test_a_run_goes_on_with_another_solver(solver, settings, few, tmp_path):
    trainer(ADMM, tmp_path, **KEPT).fit(*few)
    interrupted(tmp_path, after=1)
    assert trainer(solver, tmp_path, resume=True, **settings).fit(*few)["solver"] == solver.name
    assert lines(tmp_path)[-1]["epoch"] == 2


@pytest.mark.parametrize(("solver", "reports"), [(Backprop(), 4), (FDG(), 2)])
def test_a_pipeline_is_emptied_by_reports_as_rare_as_there_are_blocks(solver, reports, tmp_path):
    settings = {"epochs": 1, "report_every": WINDOW}
    trainer(solver, tmp_path, train=settings).fit(*digits(4 * WINDOW))
    assert sum("samples" in line for line in lines(tmp_path)) == reports


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddg": (DDG(micro_batches=4), {}),
    "petra": (Petra(micro_batches=4), {"model": "revnet8"}),
    "pd-asgd": (PDASGD(), {}),
    "local updates": (LocalUpdates(), {}),
    "waits": (
        DDG(micro_batches=4),
        {"fill": AugmentedLagrangian(), "local_budget": [(4, 0), (0, 8)]},
    ),
    "windows": (ADMM, WINDOWS),
    "uncorrected": (ADMM, WINDOWS | {"correct_every": 0}),
    "kept": (ADMM, KEPT),
    "auxnet": (AuxNet(), WINDOWS),
}


@pytest.fixture(scope="module")
def exact(few, tmp_path_factory):
    """The weights of back-propagation in some micro-batches, after one epoch and after two."""
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
    assert RoundSettings(serial_epochs=0.07).serial_steps(100) == 7  # and not 8, by rounding
    assert RoundSettings(serial_epochs=1e-9).serial_steps(10) == 1
