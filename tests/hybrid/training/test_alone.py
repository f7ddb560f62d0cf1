"""Rounds with rare corrections or none: which phases run, the same result everywhere, resume."""

from typing import Any

import pytest
from trainings import (
    BATCH,
    digits,
    interrupted,
    lines,
    spans,
    trainer,
)

from hybrid.settings.sections.rounds import WINDOW
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    LocalUpdates,
    Penalty,
)

BATCHES = 4
ALONE: dict[str, Any] = {"correct_every": 0}
KEPT: dict[str, Any] = {"window": "all", "correct_every": 0}
ONCE: dict[str, Any] = {"train": {"epochs": 1}}
PLAIN = BlockADMM(rho=0.1)


@pytest.fixture(scope="module")
def few():
    return digits(BATCHES)


def admm(**settings):
    return BlockADMM(**({"rho": 0.1, "balance_ratio": 1.5} | settings))


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
    trainer(PLAIN, tmp_path / "run", window=window, correct_every=every).fit(*few)
    assert spans(tmp_path / "run") == expected
    found = [line["phase"] for line in lines(tmp_path / "run")]
    assert found == ["serial", "parallel", "test"] * 2


@pytest.fixture
def batch_run(few, tmp_path):
    trainer(admm(), tmp_path / "run", **KEPT).fit(*few)
    interrupted(tmp_path / "run", after=1)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        (Penalty(), KEPT),
        (admm(filter=2, filter_mode="input"), KEPT),
        (PLAIN, {"window": 2}),
        (Backprop(), {}),
    ],
    ids=["penalty", "filtered-input", "hybrid", "backprop"],
)
def test_a_kept_run_goes_on_with_other_settings(solver, settings, batch_run, few):
    summary = trainer(solver, batch_run, resume=True, **settings).fit(*few)
    assert summary["solver"] == solver.name
    assert lines(batch_run)[-1]["epoch"] == 2


def test_block_admm_takes_over_a_run_of_another_solver(few, tmp_path):
    run = tmp_path / "run"
    trainer(AugmentedLagrangian(), run, **KEPT, **ONCE).fit(*few)
    (run / "summary.json").unlink()
    summary = trainer(admm(), run, resume=True, **KEPT).fit(*few)
    assert summary["solver"] == "block-admm"


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


@pytest.mark.parametrize(("solver", "reports"), [(Backprop(), 4), (FDG(), 2)])
def test_a_pipeline_is_emptied_by_reports_as_rare_as_there_are_blocks(solver, reports, tmp_path):
    settings = {"epochs": 1, "report_every": WINDOW}
    trainer(solver, tmp_path, train=settings).fit(*digits(4 * WINDOW))
    assert sum("samples" in line for line in lines(tmp_path)) == reports
