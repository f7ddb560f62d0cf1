"""A loss that grows with the number of samples is refused, and no mean of any kind is."""

import pytest
import torch
from answers import refusal
from torch import nn
from torch.nn import functional as F

from hybrid.solvers.objective import check_mean, whole_and_parts

_random = torch.Generator().manual_seed(0)
OUT = torch.randn(2, 3, generator=_random)
Y = torch.tensor([2, 0])
TOKENS = torch.randn(2, 3, 5, generator=_random)
KNOWN = torch.tensor([[1, 2, -100, -100, -100], [0, -100, 1, 2, 0]])
VALUES = torch.randn(2, 3, generator=_random)
WEIGHT = torch.tensor([0.2, 1.0, 5.0])


def contrastive(out, targets):
    """InfoNCE: of each sample among all, which grows with the logarithm of their number."""
    return F.cross_entropy(
        out @ F.normalize(VALUES[:1].repeat(len(out), 1)).T, torch.arange(len(out))
    )


def dice(out, targets):
    """1 - 2 |A B| / (|A| + |B|), over the whole batch."""
    one_hot = F.one_hot(targets, 3)
    shares = out.softmax(1)
    return 1 - 2 * (shares * one_hot).sum() / (shares.sum() + one_hot.sum())


def in_pairs(out, targets):
    """Over all pairs of samples."""
    return (out[:, None] - out).square().mean()


def of_two(out, targets):
    """Knows two samples alone."""
    return F.cross_entropy(out.view(2, 3), targets)


def sizes(out, targets):
    """The mean and a norm of the outputs, all divided."""
    return F.cross_entropy(out, targets) + 0.1 * out.norm() / len(out) ** 0.5


def autoencoder(out, targets):
    """Summed over what a sample has, averaged over samples."""
    return (out - targets).square().sum(1).mean()


MEANS = {
    "cross-entropy": (F.cross_entropy, OUT, Y),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), OUT, Y),
    "label smoothing": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), OUT, Y),
    "soft targets": (F.cross_entropy, OUT, VALUES.softmax(1)),
    "valid tokens": (F.cross_entropy, TOKENS, KNOWN),
    "all left out": (F.cross_entropy, TOKENS, torch.full_like(KNOWN, -100)),
    "of each": (nn.CrossEntropyLoss(reduction="none"), OUT, Y),
    "of each token": (nn.CrossEntropyLoss(reduction="none"), TOKENS, KNOWN),
    "of each number": (nn.MSELoss(reduction="none"), OUT, VALUES),
    "a batch mean": (nn.KLDivLoss(reduction="batchmean"), OUT.log_softmax(1), VALUES.softmax(1)),
    "of zero": (F.mse_loss, OUT, OUT),
    "negative": (lambda out, y: -F.mse_loss(out, y), OUT, VALUES),
    "over the batch": (dice, OUT, Y),
    "in pairs": (in_pairs, OUT, Y),
    "among all": (contrastive, OUT, Y),
    "of two samples": (of_two, OUT, Y),
    "and a norm": (sizes, OUT, Y),
    "a sum of a sample": (autoencoder, OUT, VALUES),
    "random": (lambda out, y: F.cross_entropy(out + torch.randn_like(out), y), OUT, Y),
    "of dicts": (
        lambda out, y: F.cross_entropy(out["a"], y["b"]),
        {"a": OUT, "other": VALUES},
        {"b": Y},
    ),
}


UNDIVIDED = {"in pairs", "among all", "and a norm"}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_is_none_of_the_refused_and_what_is_none_over_samples_is_noticed(kind):
    """But for what fails for one sample, or is random: nothing is concluded of that.

    Here dice is a mean, because the shares of each sample add up to 1.
    """
    torch.manual_seed(0)
    check_mean("the loss", *MEANS[kind])
    assert bool(whole_and_parts(*MEANS[kind])) == (kind in UNDIVIDED)


SUMS = {
    "cross-entropy": (nn.CrossEntropyLoss(reduction="sum"), OUT, Y),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), OUT, Y),
    "valid tokens": (nn.CrossEntropyLoss(reduction="sum"), TOKENS, KNOWN),
    "the first left out": (nn.CrossEntropyLoss(reduction="sum"), OUT, torch.tensor([-100, 0])),
    "over a fixed size": (lambda out, y: F.cross_entropy(out, y, reduction="sum") / 128, OUT, Y),
    "and a constant": (lambda out, y: F.cross_entropy(out, y, reduction="sum") + 100, OUT, Y),
    "negative": (lambda out, y: -F.mse_loss(out, y, reduction="sum"), OUT, VALUES),
    "of a mean and a sum": (lambda out, y: F.mse_loss(out, y) + out.square().sum(), OUT, VALUES),
    "of dicts": (
        lambda out, y: F.cross_entropy(out["a"], y["b"], reduction="sum"),
        {"a": OUT, "other": VALUES},
        {"b": Y},
    ),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_is_refused_with_the_remedy(kind):
    said = refusal(check_mean, "the loss", *SUMS[kind])
    assert said.startswith("the loss is ")
    assert "for 2 samples and " in said
    assert said.endswith(
        "for the same twice, so it is a sum: give their mean (torch's reduction='mean'), or one "
        "value for each sample (reduction='none')"
    )
