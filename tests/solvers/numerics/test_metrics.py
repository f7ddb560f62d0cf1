"""What a metric may be: scores of samples, one number of all of them, or what accumulates."""

import pytest
import torch
from answers import refusal
from measures import Kappa, macro_f1

from hybrid.solvers.metrics import (
    AllSamples,
    right_answers,
    sum_and_weight,
    training_sum,
    try_metrics,
)
from hybrid.solvers.objective import Objective

OUT = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


def test_a_function_that_gives_one_number_gets_all_samples_at_once():
    given = []

    def spread(out, targets):
        given.append((len(out), len(targets)))
        return out.max() - out.min()

    metric = try_metrics({"spread": spread}, OUT[:2], Y[:2])["spread"]
    assert isinstance(metric, AllSamples)
    for rows in (slice(0, 4), slice(4, 6)):
        metric.update(OUT[rows], Y[rows])
    assert metric.compute() == OUT.max() - OUT.min()
    assert given == [(2, 2), (6, 6)]


@pytest.mark.parametrize("metric", [right_answers, lambda out, y: out[:, 0]], ids=["right", "row"])
def test_a_function_that_gives_a_score_of_each_sample_is_asked_batch_by_batch(metric):
    assert try_metrics({"own": metric}, OUT[:2], Y[:2]) == {"own": metric}


def test_what_accumulates_has_forgotten_the_samples_it_is_tried_on():
    kappa = Kappa()
    assert try_metrics({"kappa": kappa}, OUT[:2], Y[:2]) == {"kappa": kappa}
    assert kappa.counts.sum() == 0


def test_what_a_few_samples_are_too_few_for_is_no_fault():
    class Impatient(Kappa):
        def compute(self):
            raise ValueError("too few")

    assert try_metrics({"late": Impatient()}, OUT[:2], Y[:2])


def test_outputs_of_several_tensors_reach_what_accumulates_as_they_were():
    def first(out, targets):
        return macro_f1(out["logits"], targets["class"])

    out, targets = {"logits": OUT, "hidden": OUT * 2}, {"class": Y}
    metric = try_metrics({"F1": first}, out, targets)["F1"]
    metric.update(out, targets)
    assert metric.compute() == macro_f1(OUT, Y)


class Table(Kappa):
    def compute(self):
        return self.counts


class Named(Kappa):
    def compute(self):
        return {"a": 1.0, "b": 2.0}


class Broken(Kappa):
    def update(self, out, targets):
        raise KeyError("out of luck")


class Stuck(Kappa):
    def __init__(self):
        pass

    def reset(self):
        raise KeyError("out of luck")


@pytest.mark.parametrize(
    ("metric", "part"),
    [
        (Kappa, "is the class Kappa: give an object, Kappa(...)"),
        (Table(), "gives (3, 3) of float64: it must give one number"),
        (Named(), ": it must give one number"),
        (Broken(), "fails on output (2, 3) of float32 and targets (2,) of int64: KeyError"),
        (Stuck(), "fails in reset: KeyError: 'out of luck'"),
        (lambda out, y: "good", "a metric gave 'good'"),
        (lambda out, y: out["logits"], "the metric 'own' fails on output (2, 3)"),
    ],
    ids=["a class", "a table", "several", "an update", "a reset", "a text", "an error"],
)
def test_a_metric_that_is_none_is_refused(metric, part):
    assert part in refusal(try_metrics, {"own": metric}, OUT[:2], Y[:2])


@pytest.mark.parametrize(
    ("scores", "part"),
    [(torch.zeros(4), "shape (4,) for 6 samples"), (0.5, "shape () for 6 samples")],
)
def test_scores_of_other_samples_are_refused(scores, part):
    assert part in refusal(sum_and_weight, scores, 6)


@pytest.mark.parametrize(("left_out", "weight"), [([], 6), ([0, 4], 4)], ids=["none", "two"])
def test_right_answers_weigh_as_much_as_there_are_known_classes(left_out, weight):
    targets = Y.clone()
    targets[left_out] = -100
    right = float((OUT.argmax(1) == targets).sum())
    found, counted = sum_and_weight(right_answers(OUT, targets), 6)
    assert (float(found), int(counted)) == (right, weight)
    assert float(training_sum(right_answers(OUT, targets), 6)) == pytest.approx(6 * right / weight)


def test_in_training_one_number_counts_for_every_sample():
    assert training_sum(torch.tensor(2.0), 5) == 10
    assert training_sum(torch.tensor([True, False, True]), 3) == 2
    given = Objective(metrics=try_metrics({"accuracy": lambda out, y: 0.5}, OUT, Y))(OUT, Y)
    assert given.correct == 3.0
