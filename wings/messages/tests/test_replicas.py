"""Replicas of a layer: a loop by hand, one layer in the simple case, equal weights at the end."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from message_graphs import Key, assert_stepped, entries, graph, layers, modules, samples

from hybrid_messages import Message, Static, replicated

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLAIN = partial(torch.optim.SGD, lr=0.1)


def built(mods, ways, make=MOMENTUM, frequency=1, every=1):
    """first -> replicas of body -> last; those beside the replicas step once, at the end."""
    nodes, edges = replicated("body", mods["body"], make, ways, frequency, every)
    around = layers({name: mods[name] for name in ("first", "last")}, 10**9)
    ends = [("in", "first"), ("first", "body"), ("body.out", "last"), ("last", "loss")]
    return graph({**around, **nodes}, [*ends, *edges])


def weights_of(graph, ways):
    return [[*graph.layers[f"body.{way}"].module.parameters()] for way in range(ways)]


def mean_of(copies):
    with torch.no_grad():
        for weights in zip(*(copy.parameters() for copy in copies), strict=True):
            mean = sum(weights) / len(weights)
            for weight in weights:
                weight.copy_(mean)


def by_hand(mods, x, ways, frequency, every):
    """Copies that take turns, one instance at a time, from the definition."""
    copies = [deepcopy(mods["body"]) for _ in range(ways)]
    optimizers = [MOMENTUM(copy.parameters()) for copy in copies]
    counts, steps = [0] * ways, 0

    def step(way):
        nonlocal steps
        for p in copies[way].parameters():
            p.grad /= counts[way]
        optimizers[way].step()
        optimizers[way].zero_grad()
        counts[way], steps = 0, steps + 1
        if steps % (ways * every) == 0:
            mean_of(copies)

    for i, each in enumerate(x):
        network = torch.nn.Sequential(mods["first"], copies[i % ways], mods["last"])
        (network(each) - 1).square().sum().backward()
        counts[i % ways] += 1
        if counts[i % ways] == frequency:
            step(i % ways)
    for way in range(ways):
        if counts[way]:
            step(way)  # what is left over
    mean_of(copies)
    return [p.detach() for p in copies[0].parameters()]


@given(
    ways=st.integers(1, 4),
    frequency=st.integers(1, 3),
    every=st.integers(1, 3),
    count=st.integers(1, 20),
)
def test_replicas_are_a_loop_by_hand(ways, frequency, every, count):
    mods, x = modules("first", "body", "last"), samples(count)
    wanted = by_hand(deepcopy(mods), x, ways, frequency, every)
    replicas = built(mods, ways, frequency=frequency, every=every)
    Static(replicas, 1).run(entries(x))
    for weights in weights_of(replicas, ways):
        for w, expected in zip(weights, wanted, strict=True):
            assert (w.detach() - expected).abs().max() < 1e-12


@given(ways=st.integers(1, 4), frequency=st.integers(1, 3), rounds=st.integers(1, 4))
def test_an_average_after_every_step_is_one_layer_of_a_larger_frequency(ways, frequency, rounds):
    mods, x = modules("first", "body", "last"), samples(ways * frequency * rounds)
    alone, wanted = deepcopy(mods), ways * frequency
    Static(built(alone, 1, PLAIN, wanted), 1).run(entries(x))
    Static(built(mods, ways, PLAIN, frequency), 1).run(entries(x))
    assert_stepped(mods, {name: [*m.parameters()] for name, m in alone.items()})


@given(every=st.integers(1, 3), count=st.integers(1, 9))
def test_one_replica_is_the_layer_bit_for_bit(every, count):
    copies, x = modules("first", "body", "last"), samples(count)
    mods, alone = deepcopy(copies), deepcopy(copies)
    plain = layers(alone, 10**9)
    plain["body"] = type(plain["body"])(alone["body"], MOMENTUM(alone["body"].parameters()), every)
    edges = [("in", "first"), ("first", "body"), ("body", "last"), ("last", "loss")]
    Static(graph(plain, edges), 1).run(entries(x))
    Static(built(mods, 1, frequency=every), 1).run(entries(x))
    assert_stepped(mods, {name: [*m.parameters()] for name, m in alone.items()}, tolerance=0)


@given(ways=st.integers(2, 4), active=st.integers(1, 9), count=st.integers(1, 20))
def test_after_a_run_all_have_the_same_bits_as_in_another_run(ways, active, count):
    copies, found = modules("first", "body", "last"), []
    for _ in range(2):
        replicas = built(deepcopy(copies), ways, frequency=2, every=2)
        Static(replicas, active).run(entries(samples(count)))
        found += weights_of(replicas, ways)
    for weights in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0], strict=True))
    assert not all(map(torch.equal, found[0], copies["body"].parameters()))


def test_a_message_under_way_meets_the_mean_and_not_the_weights_before():
    replicas = built(modules("first", "body", "last"), 2, PLAIN, every=1)
    first, second = (replicas.layers[f"body.{way}"] for way in range(2))
    x, dy = samples(2)
    for i in 0, 2, 4:
        first.forward(Message(0, Key(i), x), True)
    second.forward(Message(0, Key(1), 2 * x), True)
    first.backward(Message(0, Key(0), dy))
    second.backward(Message(0, Key(1), dy))  # the second step of two: a mean
    before = [w.detach().clone() for w in first.parameters]
    assert all(map(torch.equal, before, second.parameters))
    at = x.clone().requires_grad_()
    wanted = torch.autograd.grad(first.module(at), [at, *first.parameters], dy)
    (message,) = first.backward(Message(0, Key(2), dy))
    assert (message.payload - wanted[0]).abs().max() < 1e-12
    for old, new, gradient in zip(before, first.parameters, wanted[1:], strict=True):
        assert (old - new.detach() - 0.1 * gradient).abs().max() < 1e-12
    assert first.staleness == {0: 1, 1: 1}  # a mean is no update


def test_after_a_run_that_failed_all_are_equal():
    mods, rows = modules("first", "body", "last"), entries(samples(4))

    def feed():
        yield from rows[:3]
        raise OSError("gone")

    replicas = built(mods, 2, every=100)
    before = deepcopy(mods["body"])
    with pytest.raises(OSError, match="gone"):
        Static(replicas, 1).run(feed())
    first, second = weights_of(replicas, 2)
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, first, before.parameters()))


@pytest.mark.parametrize("wrong", [{"ways": 0}, {"average_every": 0}])
def test_wrong_settings_are_told(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        replicated("body", torch.nn.Linear(2, 2), PLAIN, **{"ways": 2, **wrong})
