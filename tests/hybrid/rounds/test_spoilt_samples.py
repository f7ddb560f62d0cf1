"""A loss that is not finite is blamed on the sample that made it so, by its number."""

import math

import pytest
import torch
from answers import refusal
from misused import Items, X, Y, fit
from torch import nn

from hybrid.data import Stream

pytestmark = pytest.mark.timeout(60)
ANSWERS = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
ROW, LOWER = 37, "; if the network or its loss takes that, lower the learning rate"


def spoilt(tensor, value):
    found = tensor.clone()
    found[ROW, -1] = value
    return found


def regression():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))


ANSWERED = {"loss": nn.MSELoss(), "test": None}
USES = {
    "a tensor": lambda v: ({"train": (spoilt(X, v), Y)}, "input of sample 37"),
    "an item": lambda v: (
        {"train": Items(lambda i: {"input": spoilt(X, v)[i], "label": Y[i]})},
        "input of sample 37",
    ),
    "a stream": lambda v: (
        {"train": Stream([*zip(spoilt(X, v), Y.tolist(), strict=True)])},
        "input of sample 37",
    ),
    "a target": lambda v: ({"train": (X, spoilt(ANSWERS, v))} | ANSWERED, "target of sample 37"),
    "a test": lambda v: ({"test": (spoilt(X, v), Y)}, "input of test sample 37"),
    "a test's target": lambda v: (
        {"train": (X, ANSWERS), "loss": nn.MSELoss(), "test": (X, spoilt(ANSWERS, v))},
        "target of test sample 37",
    ),
}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("use", USES)
def test_the_sample_is_named(use, value, tmp_path):
    given, place = USES[use](value)
    model = {"model": regression()} if "target" in place else {}
    said = refusal(fit, tmp_path / "run", **model, **given)
    kind = "nan" if math.isnan(value) else "inf"
    end = f"the {place} has {kind} in it: correct it, or leave it out{LOWER}"
    assert "loss is not finite" in said
    assert said.endswith(end)


def test_what_most_samples_have_is_meant(tmp_path):
    """Masks of minus infinity, and targets that are missing."""
    masks = X.masked_fill(torch.arange(6) > 2, -math.inf)
    assert refusal(fit, tmp_path / "run", train=(masks, Y)).endswith("or set a clip_norm")
