"""The progress line."""

from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks import RunInfo
from hybrid.training.callbacks.progress import ProgressPrinter

REPORTS = [
    PhaseReport("serial", samples=1000, loss=1.5, accuracy=0.5, seconds=2.0),
    PhaseReport("parallel", 1000, 1.4, 0.5, seconds=2.0, residual=[0.1, 0.3]),
]


def started(epochs, quiet=False):
    """Of epochs of 10 steps of 100 images."""
    progress = ProgressPrinter(quiet)
    progress.on_start(RunInfo({}, [], epochs, 10, 0, {}, {"train.batch_size": 100}, None))
    return progress


def test_a_plain_line_an_epoch(capsys):
    progress = started(epochs=4)
    progress.on_report(10, 0, REPORTS)
    progress.on_epoch(1, {"test_accuracy": 0.75})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/4  test 75.00%  loss 1.5000  accuracy 50.00%  250 images/s")
    assert "residual 0.300" in line
    assert "left" in line


def test_an_epoch_without_a_test_shows_the_newest(capsys):
    progress = started(epochs=4)
    for epoch, test in ((1, 0.75), (2, None)):
        progress.on_report(10 * epoch, epoch - 1, REPORTS)
        progress.on_epoch(epoch, {"test_accuracy": test})
    assert capsys.readouterr().out.count("test 75.00%") == 2


def test_a_long_epoch_speaks_in_between(capsys):
    progress = started(epochs=4)
    progress.last_line_time -= 31
    progress.on_report(5, 0, REPORTS)
    progress.on_report(6, 0, REPORTS)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 5/40")


def test_quiet_says_nothing(capsys):
    progress = started(epochs=4, quiet=True)
    progress.say("hello")
    progress.on_report(10, 0, REPORTS)
    progress.on_epoch(1, {"test_accuracy": 0.5})
    assert capsys.readouterr().out == ""
