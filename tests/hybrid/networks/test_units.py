"""Units of chains: order, names, and what cannot be cut."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybrid.networks.models import build
from hybrid.networks.units import Chain, units

SMALL = ["resnet8", "wrn-10-2", "resnet18", "resnet50"]
NAMES = [*SMALL, "resnet34", "cifar-resnet14", "resnet20", "wrn-16-1", "wrn-22-4", "revnet8"]


def names_from_units(model):
    return [
        f"{prefix}.{name}"
        for unit in units(model)
        for prefix, module in unit.parts.items()
        for name in module.state_dict()
    ]


@given(
    name=st.sampled_from(NAMES),
    classes=st.integers(2, 200),
    channels=st.integers(1, 5),
    image_size=st.integers(4, 256),
)
def test_the_units_of_any_model_reproduce_its_state_dict_names_in_order(
    name, classes, channels, image_size
):
    with torch.device("meta"):
        model = build(name, classes, channels, image_size)
        x = torch.empty(2, *model.input_shape)
    assert names_from_units(model) == list(model.state_dict())
    assert model(x).shape == (2, classes)
    assert model.input_shape == (channels, image_size, image_size)
    assert model.classes == classes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_the_units_in_order_equal_the_model_bit_for_bit_and_leave_their_inputs(name, training):
    torch.manual_seed(0)
    model = build(name, classes=5, channels=1, image_size=32).train(training)
    first = x = torch.randn(2, *model.input_shape)
    for unit in units(model):
        leaf = x.detach().clone().requires_grad_()
        out = leaf
        for module in unit.parts.values():
            out = module(out)
        out.sum().backward()
        assert torch.equal(leaf, x), unit.name
        assert leaf.grad is not None
        x = out.detach()
    assert torch.equal(x, model(first))


def test_a_sequential_with_a_forward_of_its_own_is_one_unit_inside_another():
    class Doubling(nn.Sequential):
        def forward(self, x):
            return 2 * x

    model = nn.Sequential(nn.ReLU(), Doubling(nn.ReLU(), nn.ReLU()))
    assert [unit.name for unit in units(model)] == ["0", "1"]
    with pytest.raises(ValueError, match=r"^a Doubling .* overrides forward"):
        units(model[1])


def test_a_unit_of_several_children_stays_whole_even_around_a_sequential():
    body = OrderedDict(a=nn.Sequential(nn.ReLU(), nn.ReLU()), b=nn.Flatten())
    assert [u.name for u in units(Chain(body, {"all": ("a", "b")}, (1, 4, 4), 16))] == ["all"]


def test_a_slice_of_a_chain_is_a_plain_sequential_with_the_same_modules_and_names():
    model = build("resnet8", 10, 1, 8).eval()
    part, x = model[:], torch.randn(2, 1, 8, 8)
    assert type(part) is nn.Sequential
    assert list(part.state_dict()) == list(model.state_dict())
    assert torch.equal(part(x), model(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"^a Linear is no nn.Sequential, .*with sample="),
        (nn.Sequential(), r"^the model has 0 units, .*: add modules"),
        (nn.Sequential(nn.Sequential()), r"^the model has 0 units, .*: add modules"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_remedy(model, message):
    with pytest.raises(ValueError, match=message):
        units(model)
