"""How nodes take turns: the same bits, the bound on active instances, nothing left behind."""

import random
import time
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from message_graphs import Key, assert_stepped, entries, graph, layers, modules, samples

from hybrid_messages import AnyOrder, Entry, Layer, Loop, Source, Static, Together

TURNS = [0, 3, 1, 5, 0, 2, 2, 4]
EDGES = [
    *[("in", "first"), ("first", "loop"), ("loop", "body"), ("body", "loop:1")],
    *[("loop:1", "last"), ("last", "loss")],
]


def looped(mods, every=2, kind=Layer, **more):
    """Instances overtake each other: they take different numbers of turns."""
    loop = Loop(
        lambda key: key.place == TURNS[key.instance % len(TURNS)],
        lambda key: Key(key.instance, key.place + 1),
    )
    return graph({**layers(mods, every, kind), "loop": loop, **more}, EDGES)


@pytest.mark.parametrize("kind", [Layer, Together])
@given(active=st.integers(1, 9))
def test_the_static_form_has_the_same_bits_on_any_number_of_threads(kind, active):
    copies, x = modules("first", "body", "last"), samples(8)
    found = []
    for workers in (1, 2, 5):
        mods = deepcopy(copies)
        executor = Static(looped(mods, 2, kind), active, workers)
        losses = [outcome.loss for outcome in executor.run(entries(x))]
        late = [dict(layer.staleness) for layer in executor.graph.layers.values()]
        found.append((mods, (losses, late, executor.ticks)))
    for mods, told in found[1:]:
        assert told == found[0][1]
        wanted = {name: list(module.parameters()) for name, module in found[0][0].items()}
        assert_stepped(mods, wanted, tolerance=0)


@pytest.mark.parametrize("run", [Static, AnyOrder])
@given(active=st.integers(1, 9))
def test_there_are_never_more_active_instances_than_allowed(run, active):
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
    executor = run(built, active)
    executor.run(feed())
    assert max(under_way) == executor.most_active == active


@pytest.mark.parametrize("run", [Static, AnyOrder])
def test_outcomes_come_in_the_order_of_instances_and_evaluation_leaves_no_trace(run):
    mods, x = modules("first", "body", "last"), samples(16)
    before = deepcopy(mods)
    executor = run(looped(mods), 8)
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
    assert executor.graph.kept() == 0
    assert all(
        layer.updates == 0 and not layer.staleness for layer in executor.graph.layers.values()
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_order_applies_every_gradient_once_whatever_the_pauses(workers):
    pauses = random.Random(0)
    copies, x = modules("first", "body", "last"), samples(16)
    mods = deepcopy(copies)
    for module in mods.values():
        module.register_forward_pre_hook(lambda *_: time.sleep(pauses.random() / 1000))
    built = looped(mods, every=10**9)
    executor = AnyOrder(built, 6, workers, {"body": workers - 1})
    executor.run(entries(x))
    wanted = deepcopy(copies)
    Static(looped(wanted, every=10**9)).run(entries(x))
    assert_stepped(mods, {n: list(m.parameters()) for n, m in wanted.items()})
    assert sum(built.layers["body"].staleness.values()) == 2 * sum(TURNS)
    assert built.kept() == 0


@pytest.mark.parametrize("run", [Static, AnyOrder])
def test_a_run_of_nothing_is_over_at_once(run):
    mods = modules("first", "body", "last")
    assert run(looped(mods), 3).run([]) == []


def test_a_shorter_path_takes_fewer_ticks():
    def ticks(instances):
        executor = Static(looped(modules("first", "body", "last")), 1)
        executor.run([entries(samples(16))[i] for i in instances])
        return executor.ticks

    assert ticks([3]) - ticks([0]) == 4 * TURNS[3]  # body and loop, up and down


def test_two_workers_compute_at_the_same_time():
    """A node that waits keeps the other worker's node from nothing."""
    met = []

    class Slow(torch.nn.Linear):
        def forward(self, x):
            met.append(("start", self))
            time.sleep(0.02)
            met.append(("end", self))
            return super().forward(x)

    mods = {name: Slow(3, 3).double() for name in ("first", "last")}
    nodes = layers(mods, 10**9)
    built = graph(nodes, [("in", "first"), ("first", "last"), ("last", "loss")])
    AnyOrder(built, 4, 2, {"first": 0, "last": 1}).run(entries(samples(8)))
    open_at_once = most = 0
    for kind, _ in met:
        open_at_once += 1 if kind == "start" else -1
        most = max(most, open_at_once)
    assert most == 2


@dataclass(frozen=True)
class Turn:
    instance: int
    left: int


@pytest.mark.parametrize("run", [Static, AnyOrder])
def test_a_state_may_be_a_frozen_dataclass(run):
    mods = modules("body")
    loop = Loop(lambda at: at.left == 0, lambda at: replace(at, left=at.left - 1))
    edges = [("in", "loop"), ("loop", "body"), ("body", "loop:1"), ("loop:1", "loss")]
    built = graph({**layers(mods, 1), "loop": loop}, edges)
    instances = [[Entry("in", Turn(i, i), x)] for i, x in enumerate(samples(4))]
    outcomes = run(built, 2).run(instances)
    assert [outcome.state for outcome in outcomes] == [Turn(i, 0) for i in range(4)]
    assert built.layers["body"].updates == 0 + 1 + 2 + 3


@pytest.mark.parametrize("run", [Static, AnyOrder])
@pytest.mark.parametrize("first", [0, 5])
def test_instances_that_cannot_be_read_end_the_run_with_their_own_reason(run, first):
    def feed():
        yield from entries(samples(5))[:first]
        raise OSError("the file of trees is gone")

    built = looped(modules("first", "body", "last"))
    executor = run(built, 3)
    with pytest.raises(OSError, match="the file of trees is gone"):
        executor.run(feed())
    assert built.kept() == 0
    assert len(executor.run(entries(samples(5)))) == 5
