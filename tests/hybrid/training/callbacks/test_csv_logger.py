"""A run's curves as a table."""

import csv
import shutil

import pytest
from callback_program import STEPS, few, short
from trainings import interrupted, refused

from hybrid import CSVLogger
from hybrid.solvers import AugmentedLagrangian


def rows(file):
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def without_time(file):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows(file)]


def test_a_row_a_phase_and_one_an_epoch(tmp_path):
    file = tmp_path / "log.csv"
    solver = AugmentedLagrangian()
    found = short([CSVLogger(file)], None, 1, solver=solver, window=4).fit(*few())
    told = rows(file)
    assert [(row["step"], row["phase"]) for row in told] == [
        *(("4", "serial"), ("4", "parallel"), ("5", "serial"), ("5", "parallel"), ("5", "epoch"))
    ]
    assert float(told[-1]["test_accuracy"]) == found["test_accuracy"]
    assert float(told[-1]["learning_rate"]) == pytest.approx(0.1)
    assert float(told[1]["residual"]) > 0
    assert told[0]["residual"] == told[0]["test_accuracy"] == ""
    assert told[0]["samples"] == "128"


def test_a_killed_and_resumed_run_has_the_rows_of_an_undisturbed_one(tmp_path):
    run, file = tmp_path / "run", tmp_path / "log.csv"
    short([CSVLogger(file)], run).fit(*few())
    whole = without_time(file)
    for after in (1, 0):
        interrupted(run, after)
        with file.open("a") as log:
            log.write("99,9,ser")  # cut off
        short([CSVLogger(file)], run, resume=True).fit(*few())
        assert without_time(file) == whole
        assert file.read_text().endswith("\n")


def test_a_resumed_run_whose_file_is_gone_begins_one(tmp_path):
    run, file = tmp_path / "run", tmp_path / "log.csv"
    short([CSVLogger(file)], run).fit(*few())
    interrupted(run, 1)
    file.unlink()
    short([CSVLogger(file)], run, resume=True).fit(*few())
    assert {int(row["step"]) for row in rows(file)} == {STEPS + 4, 2 * STEPS}


def test_a_new_metric_gets_a_column(tmp_path):
    log = CSVLogger(tmp_path / "log.csv")
    log._drop_rows_after(0)
    for step, more in ((1, {}), (2, {"test_loss": 0.5})):
        log.on_epoch(step, {"step": step, **more})
    assert [row["test_loss"] for row in rows(log.file)] == ["", "0.5"]


def test_another_file_is_not_overwritten(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("my,own\n1,2\n")
    said = refused(short([CSVLogger(file)]), few())
    assert said == (
        f"callback CSVLogger failed in on_start: {file} is no file of CSVLogger: choose another "
        "name"
    )
    assert file.read_text() == "my,own\n1,2\n"


def test_a_folder_that_is_missing_or_removed_is_named(tmp_path):
    file = tmp_path / "logs" / "log.csv"
    assert f"{file.parent} is not a folder: make it" in refused(short([CSVLogger(file)]), few())
    file.parent.mkdir()

    class Removed(CSVLogger):
        def on_start(self, run):
            super().on_start(run)
            shutil.rmtree(file.parent)

    assert f"failed in on_report: {file}" in refused(short([Removed(file)]), few())
