"""Whatever is wrong is one line that names the node and the key; no hang, and nothing is left."""

from copy import deepcopy

import pytest
import torch
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
from torch import nn

from hybrid_messages import Cond, Entry, Group, Layer, Loop, Phi, Source, Static, Sum

X = samples(4)
CHAIN = [("in", "a"), ("a", "node"), ("node", "loss")]


def build(node, edges):
    return graph({**layers(modules("a"), 1), "node": node}, edges)


def square(key):
    return Key(key.instance, (0, 0)), Key(key.instance, (0, 1))


def frozen(module):
    return Layer(module.double().requires_grad_(False))


class Foreign(Cond):
    def forward(self, message, learn):
        return [message._replace(state=Key(99))]


BAD = {
    "shape": (frozen(nn.Linear(5, 3)), CHAIN),
    "way": (Cond(lambda key: 7, 1), CHAIN),
    "loop": (
        Loop(lambda key: False, lambda key: key),
        [("in", "a"), ("a", "node"), ("node", "node:1"), ("node:1", "loss")],
    ),
    "waits": (Group(lambda key: Key(key.instance, 1), square), CHAIN),
    "foreign": (Foreign(lambda key: 0, 1), CHAIN),
    "user": (Cond(lambda key: {}[key.instance], 1), CHAIN),
}
SAYS = {
    "shape": r"node 'node', Key\(instance=0, place=0\), payload \(3,\): .*(size|shape)",
    "way": r"node 'node', Key\(instance=0.*: the chosen way is 7; there are 0 to 0",
    "loop": r"node 'node', Key\(instance=0.*`step` has given the same state again",
    "waits": r"node 'node', Key\(instance=0.*it belongs to Key\(instance=0, place=1\)",
    "foreign": r"node 'node' sends a message of instance 99 for one of Key\(instance=0",
    "user": r"node 'node', Key\(instance=0.*: KeyError: 0",
}


@pytest.mark.parametrize("fault", BAD)
def test_a_fault_names_its_node_and_key_and_leaves_the_graph_empty(fault):
    node, edges = BAD[fault]
    built = build(node, edges)
    before = deepcopy({"a": built.layers["a"].module})
    with pytest.raises(ValueError, match=SAYS[fault]) as caught:
        Static(built, 1).run(entries(X))
    assert "\n" not in str(caught.value)
    assert_empty(built)
    wanted = {name: list(module.parameters()) for name, module in before.items()}
    assert_stepped({"a": built.layers["a"].module}, wanted, tolerance=0)


def test_a_message_that_never_comes_is_named_by_who_waits_for_it():
    nodes = {**layers(modules("a"), 1), "half": Source(), "sum": Sum(2)}
    built = graph(nodes, [("in", "a"), ("a", "sum"), ("half", "sum:1"), ("sum", "loss")])
    with pytest.raises(ValueError, match=r"node 'a' still waits for .*Key\(instance=0, place=0\)"):
        Static(built, 2).run(entries(X))
    assert_empty(built)
    whole = [[*each, Entry("half", each[0].state, X[0])] for each in entries(X)]
    assert len(Static(built, 2).run(whole)) == 4  # and it works on


@pytest.mark.parametrize(
    ("instances", "says"),
    [
        ([entries(X)[0], entries(X)[0]], "instance 0 is under way already"),
        ([[Entry("a", Key(0), X[0])]], "instance 0 enters at 'a', which is no Source"),
        ([[Entry("inn", Key(0), X[0])]], "unknown node 'inn'; did you mean 'in'"),
        ([[]], "must bring messages of its own"),
        ([[*entries(X)[0], *entries(X)[1]]], r"messages of its own, not of \[0, 1\]"),
        ([[Entry("in", Key(0), X[0]), Entry("in", Key(0), X[0])]], "node 'a', .* is here already"),
        ([[Entry("in", Key(0), X[0] * torch.nan)]], "node 'loss', .*the loss is nan; a lower"),
    ],
)
def test_instances_that_cannot_be(instances, says):
    built = graph(layers(modules("a"), 1), [("in", "a"), ("a", "loss")])
    with pytest.raises(ValueError, match=says):
        Static(built, 3).run(instances)
    assert_empty(built)


@pytest.mark.parametrize(
    ("nodes", "edges", "says"),
    [
        ({}, [("in", "lost")], "unknown node 'lost'; did you mean 'loss'"),
        ({}, [("in", "loss:1")], "'loss' has 1 inputs, so no input 1"),
        ({"phi": Phi(2)}, [("in", "phi"), ("phi", "loss")], "input 1 of 'phi' has no edge"),
        (
            {"phi": Phi(1)},
            [("in", "phi"), ("in", "loss")],
            "has an edge already; put a Bcast there",
        ),
        (
            {"cond": Cond(lambda key: 0, 2)},
            [("in", "cond"), ("cond", "loss"), ("cond:1", "loss")],
            "input 0 of 'loss' has an edge already; put a Phi or a Sum there",
        ),
        ({"cond": Cond(lambda key: 0, 1)}, [("in", "loss")], "output 0 of 'cond' has no edge"),
    ],
)
def test_edges_that_cannot_be(nodes, edges, says):
    with pytest.raises(ValueError, match=says):
        graph(nodes, edges)


def test_nodes_that_cannot_be():
    module = nn.Linear(3, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=1)
    with pytest.raises(ValueError, match="'a' and 'b' share a parameter"):
        graph(
            {"a": Layer(module, sgd), "b": Layer(module, sgd)},
            [("in", "a"), ("a", "b"), ("b", "loss")],
        )
    with pytest.raises(ValueError, match="2 parameters to train and its optimizer holds 0"):
        Layer(module)
    with pytest.raises(ValueError, match="Dropout '1' cannot be in a layer"):
        Layer(nn.Sequential(nn.Tanh(), nn.Dropout(0.5)))
    with pytest.raises(ValueError, match="BatchNorm1d cannot be in a layer"):
        Layer(nn.BatchNorm1d(3))
