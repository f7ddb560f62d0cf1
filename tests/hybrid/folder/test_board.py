"""TensorBoard's events: readable, and never the end of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainings import digits, lines, trainer

from hybrid.folder import board
from hybrid.folder.board import Board
from hybrid.solvers import Penalty


def line(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "epoch": 0, "phase": "serial", **values}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    made = Board(tmp_path, 0)
    for step in (1, 2, 3):
        made.add(
            line(step, loss=step / 2, residual=[0.5, 0.25], notices=["so"], samples=64, seconds=0.5)
        )
    made.close()
    assert made.notice == ""
    assert scalars(tmp_path, "serial/loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert scalars(tmp_path, "serial/samples_per_second")[0] == (1, 128.0)
    assert scalars(tmp_path, "serial/residual/2") == [(1, 0.25), (2, 0.25), (3, 0.25)]


def test_what_was_written_of_later_steps_is_purged_by_a_resume(tmp_path) -> None:
    for from_step, steps in ((0, (1, 2, 3)), (1, (2,))):
        made = Board(tmp_path, from_step)
        for step in steps:
            made.add(line(step, loss=float(step + from_step)))
        made.close()
    assert scalars(tmp_path, "serial/loss") == [(1, 1.0), (2, 3.0)]


def test_a_disk_that_is_full_is_one_notice(tmp_path, monkeypatch) -> None:
    made = Board(tmp_path, 0)
    assert made._records is not None
    made._records._writer = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    made.add(line(1, loss=0.5))
    assert "No space left on device" in made.notice
    made.add(line(2, loss=0.5))
    made.close()


@pytest.mark.parametrize("when", ["at the start", "later", "removed"])
def test_a_run_goes_on_without_events_and_says_so_once(when, tmp_path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"

    def fail(*_: object) -> None:
        if when == "removed":
            shutil.rmtree(run / "events", ignore_errors=True)
        else:
            raise OSError(30, "Read-only file system", str(run / "events"))

    name = "__init__" if when == "at the start" else "write"
    monkeypatch.setattr(board._Records, name, fail)
    made = trainer(Penalty(), run, model="plain")
    made.options.quiet = False
    made.fit(*digits(4))
    said = capsys.readouterr().out
    assert said.count("TensorBoard's events end here") == (0 if when == "removed" else 1)
    assert len(lines(run)) > 2
    assert (run / "summary.json").exists()
