"""Metrics as users write them, of outputs (N, classes), and data in class order to try them on."""

import torch
from torch import nn
from trainings import metrics_of, trainer_of

from hybrid import Callback, OptimizerSettings

CLASSES, BATCH = 3, 16
_random = torch.Generator().manual_seed(0)
X = torch.randn(100, 5, generator=_random)
Y = (X[:, :CLASSES] + 0.7 * torch.randn(100, CLASSES, generator=_random)).argmax(1)
X, Y = X[Y.argsort(stable=True)], Y.sort().values
"""100 samples, no whole number of mini-batches, the first of which have one class each."""


class Confusion:
    """Counts of (class, answer): a metric with update, compute and reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)

    def update(self, out, targets):
        self.counts.index_put_((targets, out.argmax(1)), torch.tensor(1.0).double(), True)


class Kappa(Confusion):
    """Cohen's: (p_o - p_e) / (1 - p_e), agreement beyond that of chance."""

    def compute(self):
        shares = self.counts / self.counts.sum()
        chance = shares.sum(0) @ shares.sum(1)
        return (shares.trace() - chance) / (1 - chance)


class MeanRecall(Confusion):
    """The mean over the classes of the share of their samples that are found."""

    def compute(self):
        return (self.counts.diag() / self.counts.sum(1)).mean()


def macro_f1(out, targets):
    """2 TP / (2 TP + FP + FN), the mean over the classes."""
    answers, classes = out.argmax(1), torch.arange(CLASSES)[:, None]
    met, given = targets == classes, answers == classes
    return (2 * (met & given).sum(1) / (met.sum(1) + given.sum(1)).clamp_min(1)).mean()


def auroc(out, targets):
    """The share of pairs of a sample of class 0 and another in which the former scores higher."""
    scores = out.softmax(1)[:, 0]
    ahead = scores[targets == 0][:, None] - scores[targets != 0]
    return ((ahead > 0).double() + 0.5 * (ahead == 0).double()).mean().item()


class Told(Callback):
    """Writes down the accuracies of every report."""

    def __init__(self):
        self.accuracies = []

    def on_report(self, step, epoch, reports):
        self.accuracies += [report.accuracy for report in reports]


def trainer(blocks=1, replicas=1, solver=None, metrics=None, settings=None, **others):
    """Two epochs; a learning rate of 1e-30 leaves the weights as they are."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )
    return trainer_of(
        *(network, solver, blocks),
        sample=X[:4],
        replicas=replicas,
        train={"batch_size": BATCH, **(settings or {})},
        metrics=metrics or {"kappa": Kappa(), "F1": macro_f1, "AUROC": auroc},
        optimizer=OptimizerSettings(lr=others.pop("lr", 0.1)),
        **others,
    )


def measured(blocks, replicas):
    """The metrics of a training's end, of an evaluation, and the accuracies while it trained."""
    told = Told()
    metrics = {"kappa": Kappa(), "F1": macro_f1, "AUROC": auroc, "accuracy": MeanRecall()}
    made = trainer(blocks, replicas, metrics=metrics, callbacks=[told])
    return metrics_of(made.fit((X, Y), (X, Y))), made.evaluate((X, Y)), told.accuracies
