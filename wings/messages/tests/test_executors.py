"""How nodes take turns: the same bits, the bound on active instances, nothing left behind."""

from copy import deepcopy

import pytest
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

from hybrid_messages import Loop, Source, Static

TURNS = [0, 3, 1, 5, 0, 2, 2, 4]
EDGES = [
    *[("in", "first"), ("first", "loop"), ("loop", "body"), ("body", "loop:1")],
    *[("loop:1", "last"), ("last", "loss")],
]


def looped(mods, every=2, **more):
    """Instances overtake each other: they take different numbers of turns."""
    loop = Loop(
        lambda key: key.place == TURNS[key.instance % len(TURNS)],
        lambda key: Key(key.instance, key.place + 1),
    )
    return graph({**layers(mods, every), "loop": loop, **more}, EDGES)


@given(active=st.integers(1, 9))
def test_a_run_has_the_same_bits_again(active):
    copies, x = modules("first", "body", "last"), samples(8)
    found = []
    for _ in range(2):
        mods = deepcopy(copies)
        executor = Static(looped(mods), active)
        losses = [outcome.loss for outcome in executor.run(entries(x))]
        late = [dict(layer.staleness) for layer in executor.graph.layers.values()]
        found.append((mods, (losses, late, executor.ticks)))
    for mods, told in found[1:]:
        assert told == found[0][1]
        wanted = {name: list(module.parameters()) for name, module in found[0][0].items()}
        assert_stepped(mods, wanted, tolerance=0)


@given(active=st.integers(1, 9))
def test_there_are_never_more_active_instances_than_allowed(active):
    class Counting(Source):
        home = 0

        def backward(self, message):
            self.home += 1
            return super().backward(message)

    source, under_way = Counting(), []

    def feed():
        for number, each in enumerate(entries(samples(20))):
            under_way.append(number + 1 - source.home)  # with the one that is asked for
            yield each

    built = looped(modules("first", "body", "last"), **{"in": source})
    executor = Static(built, active)
    executor.run(feed())
    assert max(under_way) == executor.most_active == active


def test_outcomes_come_in_the_order_of_instances_and_evaluation_leaves_no_trace():
    mods, x = modules("first", "body", "last"), samples(16)
    before = deepcopy(mods)
    executor = Static(looped(mods), 8)
    outcomes = executor.run(entries(x), learn=False)
    assert [outcome.state.instance for outcome in outcomes] == list(range(16))
    for i, outcome in enumerate(outcomes):
        y = mods["first"](x[i])
        for _ in range(TURNS[i % len(TURNS)]):
            y = mods["body"](y)
        y = mods["last"](y)
        assert (outcome.output - y).abs().max() < 1e-12
        assert abs(outcome.loss - (y - 1).square().sum().item()) < 1e-12
    assert_stepped(mods, {n: list(m.parameters()) for n, m in before.items()}, tolerance=0)
    assert_empty(executor.graph)
    assert all(
        layer.updates == 0 and not layer.staleness for layer in executor.graph.layers.values()
    )


@pytest.mark.parametrize("first", [0, 5])
def test_instances_that_cannot_be_read_end_the_run_with_their_own_reason(first):
    def feed():
        yield from entries(samples(5))[:first]
        raise OSError("the file of trees is gone")

    built = looped(modules("first", "body", "last"))
    executor = Static(built, 3)
    with pytest.raises(OSError, match="the file of trees is gone"):
        executor.run(feed())
    assert_empty(built)
    assert len(executor.run(entries(samples(5)))) == 5
