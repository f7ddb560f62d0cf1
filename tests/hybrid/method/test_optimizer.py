"""Which parameters decay; optimizers of torch by name; optimizers of one's own."""

import pytest
import torch
from answers import refusal
from torch import nn

from hybrid.method import optimizers
from hybrid.method.optimizers import make_optimizer
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Block
from hybrid.solvers.acting import Facts, check


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
        ("sgd", {"dampening": 0.1}, "Nesterov momentum requires a momentum and zero dampening"),
        ("rmsprop", {"eps": "small"}, "'<=' not supported"),
        ("sgd", {"damping": 0.1}, "unexpected keyword argument 'damping'"),
    ],
)
def test_what_torch_says_of_an_argument_is_told_with_its_name(name, arguments, said):
    message = refusal(of_name, name, **arguments)
    assert message.startswith(f"optimizer.arguments is {arguments} of ")
    assert said in message


def rules(settings, model):
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(model, settings, optimizers.find_vectors(model).values()).param_groups
    return {
        names[id(p)]: (group["rule"], group["lr"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


def test_muon_steps_matrices_and_another_the_rest():
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.Conv1d(4, 5, 3), nn.LayerNorm(5), nn.Linear(5, 2)
    )
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 1, 4)))
    settings = OptimizerSettings(name="muon", vectors="adamw", vectors_lr=0.004, weight_decay=0.1)
    found = rules(settings, model)
    muon, others, plain = ("muon", 0.02, 0.1), ("adamw", 0.004, 0.1), ("adamw", 0.004, 0.0)
    assert found == {
        "1.weight": muon,
        "2.weight": muon,
        **dict.fromkeys(("0.weight", "4.weight", "token"), others),
        **dict.fromkeys(("1.bias", "2.bias", "3.weight", "3.bias", "4.bias"), plain),
    }


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
    check({"optimizer": settings}, Facts(optimizer=settings))


@pytest.mark.parametrize(
    ("name", "count"), [("sgd", 1), ("adamw", 2), ("muon", 1), ("Adafactor", 0.01)]
)
def test_the_memory_of_a_weight_counts_what_is_kept_of_it(name, count):
    assert optimizers.count_moments(OptimizerSettings(name=name)) == count


def test_the_moments_of_an_own_optimizer_are_its_states():
    def factory(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    own = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], amsgrad=True)
    assert (optimizers.count_moments(factory), optimizers.count_moments(own)) == (1, 3)


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
        (
            lambda groups: torch.optim.SGD(groups, 0.0),
            "learning rates 0.0, 0.0: give each a number",
        ),
    ],
)
def test_what_a_factory_may_not_give_is_one_line(factory, said):
    assert said in refusal(make_optimizer, nn.Linear(2, 2), factory)


def test_groups_keep_the_ratio_of_their_rates():
    module = nn.Linear(2, 2)
    rates = iter((0.1, 0.4))
    made = make_optimizer(
        module, lambda groups: torch.optim.SGD([{**g, "lr": next(rates)} for g in groups])
    )
    assert optimizers.peak_rate(made) == 0.1
    block = Block(module, 0, 1, {"exact": made, "local": made})
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    block.step("exact", 0.05)
    moved = [b - p for b, p in zip(before, module.parameters(), strict=True)]
    torch.testing.assert_close(moved, [torch.full((2, 2), 0.05), torch.full((2,), 0.2)])
