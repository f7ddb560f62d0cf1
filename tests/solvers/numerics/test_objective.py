"""Losses and metrics of a mini-batch or of each sample count the same."""

from types import SimpleNamespace

import pytest
import torch
from answers import refusal
from torch import nn

from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.metrics import right_answers
from hybrid.solvers.objective import Objective

OUT = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
Y = torch.arange(6) % 3
entropy = nn.functional.cross_entropy


def each(out, targets):
    return entropy(out, targets, reduction="none")


def shares(out, targets):
    """A score of each sample, (N, classes)."""
    return out.softmax(1)


@pytest.mark.parametrize("loss", [entropy, each], ids=["mean", "of each"])
def test_a_loss_gives_the_mean_or_one_of_each_sample(loss):
    found = Objective(loss)(OUT, Y).loss
    assert found.shape == ()
    assert found.requires_grad
    assert torch.allclose(found, entropy(OUT, Y))


def test_a_loss_of_each_token_is_the_mean_over_all():
    out, targets = torch.randn(2, 3, 5, requires_grad=True), torch.zeros(2, 5, dtype=torch.int64)
    assert torch.allclose(Objective(each)(out, targets).loss, entropy(out, targets))


METRICS = {
    "right answers": (right_answers, float((OUT.argmax(1) == Y).sum())),
    "scores": (lambda out, y: out[:, 0], float(OUT.detach()[:, 0].sum())),
    "several scores": (shares, 2.0),
}


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_is_summed_over_the_samples(kind):
    metric, expected = METRICS[kind]
    found = Objective(entropy, {"accuracy": metric})(OUT, Y)
    assert float(found.correct) == pytest.approx(expected)
    assert not found.correct.requires_grad
    sums = Objective(entropy, {"own": metric}).measured(OUT.detach(), Y)
    assert sums.dtype is torch.float64
    (loss, _), (counted, _) = sums.tolist()
    assert counted == pytest.approx(expected)
    assert loss == pytest.approx(float(entropy(OUT.detach(), Y)) * 6)
    assert sums[:, 1].tolist() == [6, 6]


def test_the_first_metric_alone_counts_in_training_and_all_of_them_in_a_test():
    def never(out, targets):
        raise AssertionError

    objective = Objective(entropy, {"accuracy": right_answers, "late": never})
    assert objective(OUT, Y).correct is not None
    assert Objective(entropy, {})(OUT, Y).correct is None
    many = Objective(entropy, {"a": right_answers, "b": shares})
    assert len(many.measured(OUT.detach(), Y)) == 3


def test_targets_that_lie_side_by_side_reach_the_loss_as_they_were():
    targets = {"kind": Y, "weight": torch.full((6,), 0.5)}
    bundle = Bundle.of(targets, 6, "a target")

    def weighted(out, known):
        assert known["kind"].dtype is torch.int64
        return each(out, known["kind"]) * known["weight"]

    found = Objective(weighted, {}, bundle)(OUT, bundle.pack(targets))
    assert torch.allclose(found.loss, entropy(OUT, Y) / 2)


def test_an_output_of_several_tensors_reaches_the_loss_and_the_metric():
    def first(out, targets):
        return entropy(out["logits"], targets)

    def accuracy(out, targets):
        assert not out["logits"].requires_grad
        return right_answers(out["logits"], targets)

    found = Objective(first, {"accuracy": accuracy})({"logits": OUT, "hidden": OUT * 2}, Y)
    assert torch.allclose(found.loss, entropy(OUT, Y))


def failing(out, targets):
    raise KeyError("out of\nluck")


REFUSED = {
    "another length": (lambda out, y: out[:4, 0], "shape (4,) for 6 samples"),
    "a number": (lambda out, y: 3.0, "gave a float, not a tensor"),
    "without a graph": (lambda out, y: each(out.detach(), y), "without a gradient"),
    "an error": (failing, "the loss fails on output (6, 3) of float32 and targets (6,) of int64"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loss_that_is_none_is_refused(kind):
    loss, part = REFUSED[kind]
    assert part in refusal(Objective(loss, {}), OUT, Y)
    if kind == "an error":
        with pytest.raises(ValueError, match="the loss fails") as caught:
            Objective(loss, {})(OUT, Y)
        assert isinstance(caught.value.__cause__, KeyError)


def test_an_output_that_holds_its_logits_by_name_is_told_the_remedy():
    for out in ({"logits": OUT}, SimpleNamespace(logits=OUT)):
        said = refusal(Objective(entropy), out, Y)
        assert "the loss fails on output " in said
        assert said.endswith("or give loss=lambda output, targets: ... of output.logits")


def test_a_metric_that_is_none_is_refused_in_training_and_in_a_test():
    objective = Objective(entropy, {"accuracy": failing})
    for asked, out in ((objective, OUT), (objective.measured, OUT.detach())):
        assert "the metric 'accuracy' fails on output (6, 3)" in refusal(asked, out, Y)
