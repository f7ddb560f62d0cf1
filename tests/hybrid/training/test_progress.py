"""The progress line."""

import pytest

from hybrid.rounds.report import PhaseReport
from hybrid.training.progress import Progress

REPORTS = [
    PhaseReport("serial", samples=1000, loss=1.5, accuracy=0.5, seconds=2.0),
    PhaseReport("parallel", 1000, 1.4, 0.5, seconds=2.0, residual=[0.1, 0.3]),
]


def test_a_plain_line_an_epoch_where_there_is_no_terminal(capsys):
    progress = Progress(epochs=4, steps_per_epoch=10, start_step=0, quiet=False)
    progress.step(10, REPORTS, 1000)
    progress.epoch(1, REPORTS, 0.75)
    progress.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/4  test 75.00%  loss 1.5000  accuracy 50.00%  250 images/s")
    assert "residual 0.300" in line
    assert "left" in line


def test_a_long_epoch_speaks_in_between(capsys, monkeypatch):
    progress = Progress(epochs=4, steps_per_epoch=10, start_step=0, quiet=False)
    progress.spoken -= 31
    progress.step(5, REPORTS, 1000)
    progress.step(6, REPORTS, 1000)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 5/40")


def test_quiet_says_nothing(capsys):
    progress = Progress(epochs=4, steps_per_epoch=10, start_step=0, quiet=True)
    progress.say("hello")
    progress.epoch(1, REPORTS, 0.5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("variable", ["CI", "NO_COLOR", "SLURM_JOB_ID"])
def test_a_terminal_gets_plain_lines_where_a_log_is_expected(variable, monkeypatch):
    monkeypatch.setattr("hybrid.training.progress._terminal", lambda: True)
    monkeypatch.setenv(variable, "1")
    assert Progress(1, 1, 0, quiet=False)._bar is None


def test_a_terminal_gets_a_live_line(monkeypatch, capsys):
    for variable in ("CI", "NO_COLOR", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("hybrid.training.progress._terminal", lambda: True)
    progress = Progress(2, 10, 0, quiet=False)
    progress.step(5, REPORTS, 1000)
    progress.epoch(1, REPORTS, 0.5)
    progress.close()
    assert progress._bar is not None
    assert "epoch 1/2" in capsys.readouterr().out
