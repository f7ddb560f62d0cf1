"""What optimizers keep of a parameter, optimizers made like another, the average of weights."""

import pytest
import torch
from answers import refusal
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybrid.solvers import Block
from hybrid.solvers.local.heads import Head
from hybrid.solvers.numerics.optimizer_state import (
    Average,
    clone_optimizer,
    from_tensors,
    optimizer_state,
    to_tensors,
    with_momentum,
)


class Counting(torch.optim.Optimizer):
    """Keeps a number, a flag, nothing and a tensor of each parameter."""

    def __init__(self, params, lr, kind="number"):
        super().__init__(params, {"lr": lr, "kind": kind, "steps": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += group["kind"] == "group"
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["share"], state["begun"], state["none"] = state["count"] / 3, True, None
                state["last"] = p.grad.clone()
                if group["kind"] == "list":
                    state["list"] = []
                p.data -= group["lr"] * state["count"] * p.grad


def stepped(make):
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = make([parameter])
    for _ in range(3):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, parameter


CLASSES = ("SGD", "Adam", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "Adamax")


@pytest.mark.parametrize("name", [*CLASSES, "ASGD", "Adafactor", "Counting"])
def test_an_optimizer_state_comes_back_with_its_types_and_layout(name):
    cls = Counting if name == "Counting" else getattr(torch.optim, name)
    optimizer, parameter = stepped(lambda params: cls(params, lr=0.01))
    before, weights = dict(optimizer.state[parameter]), parameter.detach().clone()
    again = from_tensors(optimizer_state(optimizer, parameter), to_tensors(before))
    assert again.keys() == before.keys()
    for slot, value in before.items():
        assert type(again[slot]) is type(value)
        if isinstance(value, torch.Tensor):
            assert torch.equal(again[slot], value)
            assert (again[slot].dtype, again[slot].stride()) == (value.dtype, value.stride())
        else:
            assert again[slot] == value
    assert torch.equal(parameter, weights)


@pytest.mark.parametrize(
    ("kind", "said"), [("list", "keeps list of a parameter, a list"), ("group", "changes 'steps'")]
)
def test_what_a_checkpoint_has_no_form_for_is_one_line(kind, said):
    optimizer = Counting([nn.Parameter(torch.ones(2))], 0.1, kind)
    assert said in refusal(optimizer_state, optimizer, optimizer.param_groups[0]["params"][0])


def test_another_one_that_cannot_be_made_is_one_line():
    class Hidden(torch.optim.SGD):
        def __init__(self, params, secret):
            super().__init__(params, lr=0.1)

    groups = [{"params": [nn.Parameter(torch.ones(2))]}]
    assert "another Hidden cannot be made" in refusal(clone_optimizer, Hidden(groups, 1), groups)


def block(make):
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    exact = make(module.parameters())
    return Block(module, 0, 2, {"exact": exact, "local": exact})


def test_a_momentum_where_there_is_none_is_refused_with_the_optimizers_name():
    said = refusal(with_momentum, block(torch.optim.Adagrad).optimizers["exact"], 0.5)
    assert said.startswith("solver.momentum is 0.5, but the optimizer Adagrad has no momentum")


@pytest.mark.parametrize("name", ["Rprop", "Adafactor", "Counting"])
def test_a_head_is_trained_with_any_optimizer_and_comes_back(name):
    cls = Counting if name == "Counting" else getattr(torch.optim, name)
    made = block(lambda p: cls(p, lr=0.1))
    head = Head("linear", made, (4, 2, 2), (3,))
    for _ in range(2):
        head(made, made.module(torch.randn(5, 4))).square().sum().backward()
        made.step("local", 0.1)
    state = head.state()
    other = Head.of_state("linear", block(lambda p: cls(p, lr=0.1)), state)
    assert all(torch.equal(other.state()[key], state[key]) for key in state)


def test_the_average_is_that_of_torchs_averaged_model_bit_for_bit():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizers = {"exact": sgd, "local": sgd, "ema": Average(list(module.parameters()), 0.9)}
    block = Block(module, 0, 1, optimizers)
    reference = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for kind in ("exact", "local", "exact"):
        module(torch.randn(8, 4)).square().sum().backward()
        block.step(kind, 0.1)
        reference.update_parameters(module)
    plain = [p.detach().clone() for p in module.parameters()]
    with block.as_tested():
        assert all(map(torch.equal, module.parameters(), reference.module.parameters()))
    assert all(map(torch.equal, module.parameters(), plain))
    assert not any(map(torch.equal, module.parameters(), reference.module.parameters()))
