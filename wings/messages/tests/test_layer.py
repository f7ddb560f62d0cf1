"""A layer of messages: plain accumulation where nothing is stale, and what staleness is."""

from copy import deepcopy
from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from message_graphs import (
    Key,
    assert_empty,
    assert_stepped,
    entries,
    graph,
    layers,
    modules,
    samples,
)

from hybrid_messages import Layer, Message, Static

OPTIMIZERS = {
    "sgd": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda w: torch.optim.Adam(w, lr=0.01),
}


def chain(modules, every, make=OPTIMIZERS["sgd"]):
    nodes = {n: Layer(m, make(list(m.parameters())), every) for n, m in modules.items()}
    return graph(nodes, list(pairwise(["in", *nodes, "loss"])))


def accumulated(modules, x, every, make):
    """By hand, twice: a step with the mean gradient of every so many, and of those left over."""
    network = torch.nn.Sequential(*modules.values())
    optimizer = make(list(network.parameters()))
    for batch in 2 * x.split(every):
        for each in batch:
            (network(each) - 1).square().sum().backward()
        for w in network.parameters():
            w.grad /= len(batch)
        optimizer.step()
        optimizer.zero_grad()
    return {name: [w.detach() for w in module.parameters()] for name, module in modules.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(every=st.integers(1, 4), count=st.integers(1, 9))
def test_one_instance_at_a_time_is_accumulation_bit_for_bit(optimizer, every, count):
    copies, x, make = modules("a", "b", "c"), samples(count), OPTIMIZERS[optimizer]
    mods = deepcopy(copies)
    executor = Static(chain(mods, every, make=make), max_active_keys=1)
    for _ in range(2):  # no run leaves a remainder to the next
        executor.run(entries(x))
    assert_stepped(mods, accumulated(copies, x, every, make), tolerance=0)


@given(
    length=st.integers(1, 5),
    active=st.integers(1, 8),
    every=st.integers(1, 4),
    count=st.integers(1, 30),
)
def test_staleness_in_a_chain_is_bounded_by_the_instances_that_are_active(
    length, active, every, count
):
    built = chain(modules(*"abcde"[:length]), every)
    Static(built, active).run(entries(samples(count)))
    for layer in built.layers.values():
        assert sum(layer.staleness.values()) == count
        assert max(layer.staleness) <= ceil((active - 1) / every)
        assert layer.updates == ceil(count / every)


def test_a_gradient_is_taken_at_the_weights_of_now_and_the_input_of_then():
    (module,) = modules("a").values()
    layer = Layer(module, torch.optim.SGD(module.parameters(), lr=1.0))
    x, dy = samples(2)
    for i, each in enumerate([x, 2 * x]):
        layer.forward(Message(0, Key(i), each), True)
    layer.backward(Message(0, Key(1), dy))  # a step
    before = [w.detach().clone() for w in module.parameters()]
    at = x.clone().requires_grad_()
    wanted = torch.autograd.grad(module(at), [at, *module.parameters()], dy)
    (message,) = layer.backward(Message(0, Key(0), dy))
    assert (message.payload - wanted[0]).abs().max() < 1e-12
    steps = [old - new.detach() for old, new in zip(before, module.parameters(), strict=True)]
    for step, gradient in zip(steps, wanted[1:], strict=True):
        assert (step - gradient).abs().max() < 1e-12
    assert layer.staleness == {0: 1, 1: 1}


def test_indices_have_no_gradient_and_their_messages_come_home_all_the_same():
    table = torch.nn.Embedding(4, 3).double()
    before = table.weight.detach().clone()
    built = graph(layers({"table": table}, 10**9), [("in", "table"), ("table", "loss")])
    Static(built, 2).run(entries(torch.tensor([1, 3, 1])))
    moved = (table.weight.detach() - before).abs().sum(1) > 0
    assert moved.tolist() == [False, True, False, True]
    assert_empty(built)
