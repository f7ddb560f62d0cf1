"""Callbacks are called in order on the first rank, stop a run, show it, and fail on all ranks."""

import re

import pytest
import torch
from callback_program import STEPS, STILL, Failing, Recorder, short, short_data
from trainings import refused, summary

from hybrid import Callback
from hybrid.folder.checkpoint import complete, read_manifest
from hybrid.method.callback import RunInfo
from hybrid.rounds.phase_report import PhaseReport
from hybrid.training.callbacks.base import EarlyStopping
from hybrid.training.callbacks.progress_printer import ProgressPrinter

HOOKS = ("on_start", "on_report", "on_epoch", "state", "on_end")


class Stopping(Callback):
    """Asks to stop after an epoch."""

    def __init__(self, after):
        self.after = after

    def on_epoch(self, epoch, results):
        return epoch == self.after


def test_the_hooks_are_called_in_order_in_the_first_blocks_thread(tmp_path):
    told = Recorder()
    found = short([told], tmp_path / "run").fit(*short_data())
    epoch = ["on_report", "on_report", "on_epoch"]
    assert told.hooks() == ["on_start", *epoch, *epoch, "on_end", "close"]
    assert [(step, number) for step, number, _ in told.of("on_report")] == [
        *((4, 0), (STEPS, 0), (STEPS + 4, 1), (2 * STEPS, 1))
    ]
    assert told.of("on_end") == [[found]]
    assert told.threads == {"block 0"}
    ((run,),) = told.of("on_start")
    assert (len(run.cuts), run.epochs, run.steps_per_epoch, run.step) == (1, 2, STEPS, 0)
    assert (run.names["solver"], run.settings["optimizer.lr"]) == ("backprop", 0.1)
    assert (run.results, run.out) == ({}, tmp_path / "run")


def test_an_epochs_results_have_a_test_metric_where_it_was_measured():
    told = Recorder()
    short([told], epochs=3, train={"evaluate_every": 2}).fit(*short_data())
    results = [results for _, results in told.of("on_epoch")]
    assert [one.get("test_accuracy") is None for one in results] == [True, False, False]
    assert [one["step"] for one in results] == [STEPS, 2 * STEPS, 3 * STEPS]
    reports = [reports[0].loss for _, _, reports in told.of("on_report")]
    assert [one["loss"] for one in results] == reports[1::2]
    assert results[0]["learning_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_callback_can_stop_a_run_which_ends_as_finished(blocks, tmp_path):
    told = Recorder()
    run = tmp_path / "run"
    # without a test in that epoch: one is made up for
    settings = {"epochs": 9, "train": {"evaluate_every": 4}}
    found = short([Stopping(2), told], run, blocks=blocks, **settings).fit(*short_data())
    assert summary(run) == found
    assert found["epochs"] == 2
    assert found["stopped_early"] == "Stopping: asked for it after epoch 2"
    assert found["test_accuracy"] is not None
    assert read_manifest(complete(run / "checkpoints")[-1])["step"] == 2 * STEPS
    assert told.hooks()[-2:] == ["on_end", "close"]


class Odd(Callback):
    def state(self):
        return {"x": object()}


class Answering(Callback):
    def on_epoch(self, epoch, results):
        return torch.zeros(3)


FAILURES = {
    **{hook: (Failing(hook), f"Failing failed in {hook}: out of luck") for hook in HOOKS},
    "what no user should see": (
        Failing("on_epoch", KeyError("x")),
        r"Failing failed in on_epoch: KeyError: 'x' \(details in .*\)",
    ),
    "no number": (
        Answering(),
        "Answering failed in on_epoch: RuntimeError: Boolean value of Tensor .*",
    ),
    "a state that is no JSON": (Odd(), "Odd failed in state: TypeError: Object of type object .*"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_exception_in_a_callback_ends_the_run_with_one_line(kind, tmp_path):
    (callback, said), told, run = FAILURES[kind], Recorder(), tmp_path / "run"
    assert re.fullmatch(f"callback {said}", refused(short([callback, told], run), short_data()))
    assert told.hooks()[-1] == "close"
    # what fails at the very end costs no result
    assert (run / "summary.json").exists() == (kind == "on_end")
    assert run.exists() == (kind != "on_start")
    assert not [path for path in run.rglob("*") if "partial" in path.name]


def test_a_run_that_was_stopped_stays_as_it_is_until_it_may_wait_longer(tmp_path, capsys):
    def fit(patience):
        made = short([EarlyStopping(patience=patience)], tmp_path / "run", epochs=9, resume=True)
        made.options.optimizer, made.options.quiet = STILL, False
        made.options.resume = (tmp_path / "run").exists()
        return made.fit(*short_data())["epochs"]

    assert fit(patience=1) == 2
    assert "stopped early after epoch 2: train.early_stop: no better" in capsys.readouterr().out
    assert fit(patience=1) == 2
    said = capsys.readouterr().out
    assert "nothing is left to do: to train on, let it wait for more epochs" in said
    assert fit(patience=2) == 3


def test_a_state_that_a_callback_does_not_take_is_told(tmp_path, monkeypatch):
    run = tmp_path / "run"
    short([EarlyStopping(5)], run, epochs=1).fit(*short_data())
    stopping = EarlyStopping(5)
    monkeypatch.setattr(EarlyStopping, "load_state", lambda self, state: state["since"])
    said = refused(short([stopping], run, resume=True), short_data())
    assert "callback EarlyStopping failed in load_state: KeyError" in said


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "patience", "after"),
    [
        ([0.1, 0.2, 0.2, 0.19, 0.3], 2, 4),
        ([0.1, 0.2, 0.2, 0.19, 0.3], 3, 0),
        ([0.1, None, None, 0.1], 2, 4),
        ([NAN, 0.1, 0.2], 2, 0),
        ([NAN, NAN, 0.2], 2, 2),
    ],
)
@pytest.mark.parametrize("metric", ["test_accuracy", "test_loss"])
def test_a_run_stops_after_epochs_without_a_better_test(metric, values, patience, after):
    """By accuracy where there is one, whatever the loss does; else by the loss."""
    stopping = EarlyStopping(patience)
    for epoch, value in enumerate(values, 1):
        results = {"test_accuracy": value, "test_loss": None if value is None else float(epoch)}
        if metric == "test_loss":
            results = {metric: None if value is None else 1 - value}
        if stopping.on_epoch(epoch, results):
            break
    assert epoch * bool(stopping.reason) == after
    what = metric.replace("_", " ")
    assert not after or re.match(
        f"no (better|finite) {what} .*up to epoch {after}", stopping.reason
    )


REPORTS = [
    PhaseReport("serial", samples=1000, loss=1.5, accuracy=0.5, seconds=2.0),
    PhaseReport("parallel", 1000, 1.4, 0.5, seconds=2.0, residual=[0.1, 0.3]),
]


def started(epochs):
    """Of epochs of 10 steps of 100 images."""
    progress = ProgressPrinter(quiet=False)
    progress.on_start(RunInfo({}, [], epochs, 10, 0, {}, {"train.batch_size": 100}, None))
    return progress


def test_a_plain_line_an_epoch(capsys):
    progress = started(epochs=4)
    progress.on_report(10, 0, REPORTS)
    progress.on_epoch(1, {"test_accuracy": 0.75})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "epoch 1/4  test 75.00%  train loss 1.5000  accuracy 50.00%  250 samples/s"
    )
    assert "residual 0.300" in line
    assert "left" in line
    progress.on_epoch(2, {"test_accuracy": None})
    assert "test 75.00%" in capsys.readouterr().out, "the newest test"
    progress.quiet = True
    progress.on_epoch(3, {"test_accuracy": 0.5})
    assert capsys.readouterr().out == ""


def test_a_long_epoch_speaks_in_between(capsys):
    progress = started(epochs=4)
    progress.last_line_time -= 31
    progress.on_report(5, 0, REPORTS)
    progress.on_report(6, 0, REPORTS)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 5/40")
