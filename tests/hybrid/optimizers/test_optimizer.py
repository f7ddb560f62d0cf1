"""Which parameters decay; optimizers of torch by name; optimizers of one's own."""

import pytest
import torch
from answers import refusal
from torch import nn

from hybrid import models
from hybrid.optimizers import optimizer as optimizers
from hybrid.optimizers.optimizer import make_optimizer
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers.acting import Known, check


def decays(settings):
    model = models.build("resnet8", 10, 1, 8)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(model, settings).param_groups
    return {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_biases_and_batch_norm_do_not_decay_unless_asked_to(name):
    found = decays(OptimizerSettings(name=name, weight_decay=0.01))
    assert found["layer1.0.conv1.weight"] == found["fc.weight"] == 0.01
    assert found["layer1.0.bn1.weight"] == found["fc.bias"] == 0.0
    everything = decays(OptimizerSettings(name=name, weight_decay=0.01, decay_all=True))
    assert set(everything.values()) == {0.01}
    assert everything.keys() == found.keys()


def of_name(name, module=None, **arguments):
    settings = OptimizerSettings(name=name, lr=0.01, weight_decay=0.02, arguments=arguments)
    return make_optimizer(module or nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), settings)


@pytest.mark.parametrize(
    ("name", "cls", "arguments"),
    [
        ("rmsprop", torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        ("ADAM", torch.optim.Adam, {"amsgrad": True, "betas": [0.8, 0.9]}),
        ("Adafactor", torch.optim.Adafactor, {"d": 2.0}),
        ("Rprop", torch.optim.Rprop, {"etas": [0.4, 1.1]}),
        ("SGD", torch.optim.SGD, {"maximize": True}),
        ("AdamW", torch.optim.AdamW, {"betas": [0.5, 0.6]}),
    ],
)
def test_a_class_of_torch_is_made_by_its_name_with_its_arguments(name, cls, arguments):
    made = of_name(name, **arguments)
    assert type(made) is cls
    first, last = made.param_groups
    assert (first["lr"], first["weight_decay"], last["weight_decay"]) == (0.01, 0.02, 0.0)
    for key, value in arguments.items():
        assert first[key] == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("adam", {"betas": [0.9, 2.0]}, "Invalid beta parameter at index 1: 2.0"),
        ("adam", {"differentiable": True}, "a leaf Variable that requires grad"),
        ("sgd", {"dampening": 0.1}, "Nesterov momentum requires a momentum and zero dampening"),
        ("rmsprop", {"eps": "small"}, "'<=' not supported"),
    ],
)
def test_what_torch_says_of_an_argument_is_told_with_its_name(name, arguments, said):
    message = refusal(of_name, name, **arguments)
    assert message.startswith(f"optimizer.arguments is {arguments} of ")
    assert said in message


def test_what_takes_no_such_parameters_is_told():
    said = refusal(of_name, "muon")
    assert said.startswith("optimizer.name is 'Muon', but torch says: Muon only supports 2D")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "RMSprop", "momentum": 0.5}, "put it in optimizer.arguments"),
        ({"name": "Rprop", "weight_decay": 0.1}, "only where the optimizer has a weight decay"),
        ({"name": "adamw", "nesterov": False}, "only where optimizer.name is sgd"),
        (
            {"name": "adamw", "momentum": 0.5, "arguments": {"betas": [0.1, 0.2]}},
            "only where optimizer.arguments has no betas",
        ),
    ],
)
def test_a_setting_that_an_optimizer_does_not_read_is_refused(given, said):
    assert said in refusal(check_optimizer, OptimizerSettings(**given))
    check_optimizer(OptimizerSettings(name=given["name"]))


def check_optimizer(settings):
    check({"optimizer": settings}, Known(optimizer=settings))


@pytest.mark.parametrize(("name", "count"), [("sgd", 3), ("adamw", 4), ("Adafactor", 2)])
def test_the_memory_of_a_weight_counts_what_is_kept_of_it(name, count):
    assert optimizers.count_copies(OptimizerSettings(name=name)) == count


def test_a_factory_gets_the_groups_and_its_rate_is_the_peak():
    made = make_optimizer(
        nn.Linear(2, 2), lambda groups: torch.optim.RAdam(groups, 0.03, weight_decay=0.1)
    )
    assert type(made) is torch.optim.RAdam
    assert [(g["params"][0].ndim, g["weight_decay"]) for g in made.param_groups] == [
        (2, 0.1),
        (1, 0.0),
    ]
    assert optimizers.peak_rate(made) == 0.03


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda groups: groups, "gave a list: let it return a torch.optim.Optimizer"),
        (lambda groups: torch.optim.SGD(groups[:1]), "over 1 parameters, of which a block has 2"),
        (
            lambda groups: torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(1))]}]),
            "over 3 parameters, of which a block has 2",
        ),
        (
            lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]]),
            "gave LBFGS, but blocks have no closure",
        ),
        (lambda groups: torch.optim.SparseAdam(groups), "no sparse gradients"),
    ],
)
def test_what_a_factory_may_not_give_is_one_line(factory, said):
    assert said in refusal(make_optimizer, nn.Linear(2, 2), factory)


def test_groups_of_several_rates_are_refused():
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    assert "have the learning rates 0.1, 0.2: " in refusal(
        optimizers.peak_rate, torch.optim.SGD(groups)
    )
