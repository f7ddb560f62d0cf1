"""A metric is of all samples of an evaluation, on any grid, whatever the order of the samples."""

import pytest
import torch
from answers import refusal
from measures import CLASSES, X, Y, trainer
from sklearn import metrics as reference
from torch import nn
from trainings import metrics_of

from hybrid import split

GRIDS = [(2, 1), (1, 3), (1, 8)]
"""The test set has seven mini-batches: three replicas have unequal numbers, of eight one none."""


@torch.no_grad()
def outputs(made, inputs):
    return made.blocks.model.eval()(inputs)


def expected(out):
    answers = out.argmax(1)
    return {
        "kappa": reference.cohen_kappa_score(Y, answers),
        "F1": reference.f1_score(Y, answers, average="macro"),
        "AUROC": reference.roc_auc_score(Y == 0, out.softmax(1)[:, 0]),
    }


@pytest.mark.parametrize(("blocks", "replicas"), GRIDS)
def test_metrics_that_are_no_means_are_those_of_scikit_learn(blocks, replicas):
    made = trainer(blocks, replicas)
    found = metrics_of(made.fit((X, Y), (X, Y)))
    assert found == pytest.approx(expected(outputs(made, X)), rel=1e-6)
    again = made.evaluate((X, Y))
    again.pop("loss")
    assert again == pytest.approx(found, rel=1e-6)


def test_answers_where_targets_are_left_out_are_the_share_of_all_others():
    tokens, known = torch.arange(100)[:, None] % 5 + torch.arange(4) % 5, torch.arange(100) % 4 + 1
    targets = torch.where(torch.arange(4) < known[:, None], tokens % CLASSES, -100)
    order = known.argsort(stable=True)  # short ones first

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

        def forward(self, tokens):
            return self.head(self.embed(tokens)).movedim(1, 2)

    torch.manual_seed(0)
    made = trainer()
    made.blocks = split(Words(), 1, sample=tokens)
    made.options.metrics = None
    data = tokens[order], targets[order]
    tested = made.fit(data, data)["test_accuracy"]
    out, counted = outputs(made, data[0]), data[1] != -100
    right = reference.accuracy_score(data[1][counted], out.argmax(1)[counted])
    assert tested == pytest.approx(right, rel=1e-9)


def test_a_metric_may_be_called_what_a_line_of_metrics_has_but_not_the_loss():
    made = trainer(2, 1)
    made.options.metrics = {name: lambda out, y: y.float() for name in ("step", "phase", "samples")}
    assert metrics_of(made.fit((X, Y), (X, Y))) == pytest.approx(
        dict.fromkeys(made.options.metrics, float(Y.float().mean()))
    )
    made.options.metrics = {"loss": lambda out, y: y.float()}
    assert refusal(made.fit, (X, Y), (X, Y)).startswith("metrics has 'loss', which is the loss")
