"""Every control node's backward is autograd's on the composed dense function."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from message_graphs import (
    WIDTH,
    Key,
    assert_empty,
    assert_stepped,
    dense_step,
    entries,
    generator,
    graph,
    layers,
    modules,
    samples,
)

from hybrid_messages import Bcast, Cond, Entry, Group, Loop, Phi, Static, Sum

NEVER = 10**9
ACTIVE = [1, 4]


def check(active, nodes, edges, copies, network, inputs):
    """One step of the graph, whatever the turns, against one of plain autograd."""
    mods = {name: deepcopy(module) for name, module in copies.items()}
    built = graph({**layers(mods, NEVER), **nodes}, edges)
    Static(built, active).run(inputs)
    assert_empty(built)
    counts = {name: sum(layer.staleness.values()) for name, layer in built.layers.items()}
    assert_stepped(mods, dense_step(copies, counts, network, len(inputs)))
    return counts


@pytest.mark.parametrize("active", ACTIVE)
def test_cond_and_phi_are_a_branch(active):
    copies, x = modules("first", "a", "b", "c", "last"), samples(7)
    edges = [("in", "first"), ("first", "cond"), ("phi", "last"), ("last", "loss")]
    for way, name in enumerate("abc"):
        edges += [(f"cond:{way}", name), (name, f"phi:{way}")]
    nodes = {"cond": Cond(lambda key: key.instance % 3, 3), "phi": Phi(3)}

    def network(i):
        return copies["last"](copies["abc"[i % 3]](copies["first"](x[i])))

    counts = check(active, nodes, edges, copies, network, entries(x))
    assert counts == {"first": 7, "a": 3, "b": 2, "c": 2, "last": 7}


@pytest.mark.parametrize("active", ACTIVE)
def test_bcast_and_sum_are_a_fan(active):
    copies, x = modules("first", "a", "b", "c", "last"), samples(5)
    edges = [("in", "first"), ("first", "bcast"), ("join", "last"), ("last", "loss")]
    for way, name in enumerate("abc"):
        edges += [(f"bcast:{way}", name), (name, f"join:{way}")]

    def network(i):
        return copies["last"](sum(copies[name](copies["first"](x[i])) for name in "abc"))

    check(active, {"bcast": Bcast(3), "join": Sum(3)}, edges, copies, network, entries(x))


@pytest.mark.parametrize("active", ACTIVE)
@given(turns=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_loop_takes_its_turns_back(active, turns):
    copies, x = modules("first", "body", "last"), samples(len(turns))
    loop = Loop(lambda key: key.place == turns[key.instance], lambda key: Key(key[0], key[1] + 1))
    edges = [
        *[("in", "first"), ("first", "loop"), ("loop", "body"), ("body", "loop:1")],
        *[("loop:1", "last"), ("last", "loss")],
    ]

    def network(i):
        y = copies["first"](x[i])
        for _ in range(turns[i]):
            y = copies["body"](y)
        return copies["last"](y)

    counts = check(active, {"loop": loop}, edges, copies, network, entries(x))
    assert counts["body"] == sum(turns)


# a tree: a leaf is a number, an inner node a tuple of up to three trees
TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple),
    max_leaves=8,
)


def subtree(tree, path):
    for step in path:
        tree = tree[step]
    return tree


def leaves(tree, path=()):
    if isinstance(tree, int):
        return [path]
    return [leaf for i, part in enumerate(tree) for leaf in leaves(part, (*path, i))]


@pytest.mark.parametrize("active", ACTIVE)
@given(trees=st.lists(TREES, min_size=1, max_size=4))
def test_a_recursive_network_is_its_recursion(active, trees):
    """leaf -> phi -> root? -> last -> loss;  not the root: -> group -> cell -> phi."""

    class Mean(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).mean(-2)

    copies = modules("leaf", "cell", "last")
    copies["cell"] = Mean(copies["cell"])
    table = torch.randn(10, WIDTH, dtype=torch.float64, generator=generator())

    def parent(key):
        return Key(key.instance, key.place[:-1])

    def members(key):
        parts = subtree(trees[key.instance], key.place)
        return [Key(key.instance, (*key.place, i)) for i in range(len(parts))]

    nodes = {
        "phi": Phi(2),
        "root": Cond(lambda key: not key.place),
        "group": Group(parent, members),
    }
    edges = [
        *[("in", "leaf"), ("leaf", "phi"), ("phi", "root"), ("root:0", "group")],
        *[("group", "cell"), ("cell", "phi:1"), ("root:1", "last"), ("last", "loss")],
    ]
    inputs = [
        [Entry("in", Key(i, path), table[subtree(tree, path)]) for path in leaves(tree)]
        for i, tree in enumerate(trees)
    ]

    def value(tree):
        if isinstance(tree, int):
            return copies["leaf"](table[tree])
        return copies["cell"](torch.stack([value(part) for part in tree]))

    check(active, nodes, edges, copies, lambda i: copies["last"](value(trees[i])), inputs)
