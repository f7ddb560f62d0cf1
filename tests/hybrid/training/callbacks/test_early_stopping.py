"""When a run no longer gets better."""

import pytest
from answers import refusal
from callback_program import STILL, few, short
from trainings import refused

from hybrid import EarlyStopping

NAN = float("nan")


def stops_after(stopping, values, metric="test_accuracy"):
    """The first epoch after which it asks to stop; 0: none."""
    told = enumerate(values, 1)
    return next((epoch for epoch, x in told if stopping.on_epoch(epoch, {metric: x})), 0)


@pytest.mark.parametrize(
    ("values", "settings", "after"),
    [
        ([0.1, 0.2, 0.2, 0.19, 0.3], {"patience": 2}, 4),
        ([0.1, 0.2, 0.2, 0.19, 0.3], {"patience": 3}, 0),
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1, "min_delta": 0.2}, 2),
        ([0.1, None, None, 0.1], {"patience": 2}, 4),
        ([0.1, 0.1, 0.2], {"patience": 1, "mode": "min"}, 2),
        ([NAN, 0.1, 0.2], {"patience": 2}, 0),
        ([NAN, NAN, 0.2], {"patience": 2}, 2),
        ([float("inf"), 0.1, 0.1], {"patience": 2}, 0),
    ],
)
def test_a_run_stops_after_epochs_without_a_better_metric(values, settings, after):
    assert stops_after(EarlyStopping(**settings), values) == after


def test_a_smaller_loss_is_better():
    assert stops_after(EarlyStopping("test_loss", 2), [3.0, 2.0, 1.0, 1.5, 1.5], "test_loss") == 5


@pytest.mark.parametrize("results", [{"test_accuracy": 0.5, "test_loss": 1.0}, {"test_loss": 1.0}])
def test_the_test_metric_is_the_accuracy_or_else_the_loss(results):
    stopping = EarlyStopping("test", patience=1)
    assert not stopping.on_epoch(1, results)
    better = {"test_accuracy": 0.6, "test_loss": 2.0} if len(results) > 1 else {"test_loss": 0.5}
    assert not stopping.on_epoch(2, better)
    assert stopping.on_epoch(3, better)
    assert stopping.reason.startswith("no better test metric than 0.")


def test_an_unknown_metric_is_named_with_those_there_are():
    said = refused(short([EarlyStopping("accuracy")]), few())
    assert "metric is 'accuracy'" in said
    assert "choose learning_rate, loss, step, test_accuracy, test_loss or test" in said


@pytest.mark.parametrize(
    "wrong", [{"patience": 0}, {"min_delta": -1.0}, {"min_delta": NAN}, {"mode": "best"}]
)
def test_what_cannot_be_is_refused(wrong):
    ((name, value),) = wrong.items()
    assert refusal(EarlyStopping, **wrong).startswith(f"{name} is {value!r}; it must be ")


def test_the_setting_stops_a_run_and_a_second_fit_begins_anew():
    made = short([], epochs=9, train={"early_stop": 2}, optimizer=STILL)
    assert made.fit(*few())["epochs"] == 3
    stopping = EarlyStopping(patience=2)
    made = short([stopping], epochs=9, optimizer=STILL)
    assert [made.fit(*few())["epochs"] for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("train", [{"early_stop": 8}, {"early_stop": 3, "evaluate_every": 5}])
def test_a_setting_that_comes_too_late_to_stop_anything_is_refused(train):
    said = refused(short([], epochs=9, train=train), few())
    assert said.startswith(f"train.early_stop is {train['early_stop']}, which has an effect only")
