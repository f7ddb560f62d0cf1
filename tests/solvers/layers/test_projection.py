"""Projections onto the sets of the constraints."""

import pytest
import torch
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st

from hybrid.solvers.layers.projection import (
    Box,
    Free,
    Quantized,
    Sign,
    projection,
    skipping,
)

VALUES = st.lists(st.floats(-5, 5), min_size=1, max_size=20)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@given(st.integers(1, 4), st.floats(-3, 3), st.floats(0.1, 4), VALUES)
def test_quantized_values_are_the_nearest_of_the_grid(bits, low, width, values):
    z = double(values)
    grid = torch.linspace(low, low + width, 2**bits, dtype=torch.float64)
    distance = (z.unsqueeze(1) - grid).abs()
    P = Quantized(bits, low, low + width)
    found = P.project(z)
    assert (found.unsqueeze(1) - grid).abs().amin(1).max() < 1e-12
    torch.testing.assert_close((found - z).abs(), distance.amin(1), rtol=0, atol=1e-12)
    for again in (found, found.float()):
        again = P.project(again)
        assert torch.equal(P.project(again), again)


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("sign", st.sampled_from([-1.0, 1.0])),
        ("box:-0.5:2", st.floats(-0.5, 2)),
        ("non-negative", st.floats(0, 100)),
        ("none", st.floats(-100, 100)),
    ],
)
@given(data=st.data())
def test_no_member_of_the_set_is_nearer(text, members, data):
    z, other = data.draw(st.floats(-5, 5)), data.draw(members)
    found = float(projection(text).project(double([z])))
    assert abs(found - z) <= abs(other - z)
    assert float(projection(text).project(double([found]))) == found


@pytest.mark.parametrize(
    ("layer", "passes"),
    [
        (Sign(), lambda x: x.abs() <= 1),
        (Box(-0.5, 2), lambda x: (x >= -0.5) & (x <= 2)),
        (Quantized(2, 0, 1), lambda x: (x >= 0) & (x <= 1)),
        (Free(), lambda x: torch.ones_like(x, dtype=torch.bool)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_gradients_go_straight_through_where_they_pass(layer, passes):
    x = torch.linspace(-3, 3, 61, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(61, dtype=torch.float64)
    out = layer(x)
    (weights * out).sum().backward()
    assert torch.equal(out, layer.project(x.detach()))
    assert torch.equal(x.grad, weights * passes(x.detach()))


def test_a_layer_that_is_passed_by_is_the_identity_and_only_then():
    layer, x = Sign(), torch.tensor([-3.0, 0.5], requires_grad=True)
    with skipping(layer):
        layer(x).sum().backward()
        assert torch.equal(layer(x), x)
    assert torch.equal(x.grad, torch.ones(2))
    assert torch.equal(layer(x), torch.tensor([-1.0, 1.0]))
    with pytest.raises(RuntimeError), skipping(layer):
        raise RuntimeError
    assert not layer.skipped


WRONG = [
    *("", "Sign", "boxes", "sign:1", "none:0", "non-negative:1", "box:a:b", "box:1:2:3"),
    *("box:1:0", "box:1:1", "box:nan:1", "box:0:inf", "box:0:1e400", "box:", "box:0;1"),
    *("quantized:0", "quantized:17", "quantized:2.5", "quantized:inf", "quantized:nan"),
    *("quantized:2:1:0", "quantized:2:0:1:3", "sign\n"),
]


@pytest.mark.parametrize("text", WRONG)
def test_a_constraint_that_cannot_be_is_refused_in_one_line_that_names_it(text):
    assert f"constraint is {text!r}" in refusal(projection, text)
