"""The example of docs/: its graph, its recursion, its padding and its packing are one network."""

import importlib
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from hybrid_messages import Layer, Static, Together

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def trees(monkeypatch):
    """The module of the measurement, which holds the example's names, too."""
    monkeypatch.syspath_prepend(DOCS / "benchmarks")
    return importlib.import_module("trees")


def test_values_of_trees_are_those_of_their_expressions(trees):
    made, held = trees.make_data(0, 300, 50)
    for tree in made:
        values: list[int] = []
        for symbol, pair in zip(tree.symbols, tree.children, strict=True):
            values.append(
                symbol
                if pair is None
                else list(trees.OPERATORS.values())[symbol](*(values[child] for child in pair))
            )
        assert tree.value == values[-1]
    assert not set(made) & set(held)
    assert len(set(held)) == len(held) == 50
    assert {len(tree.symbols) for tree in made} == set(range(1, 24, 2))


@pytest.mark.parametrize("kind", [Layer, Together])
@pytest.mark.parametrize("other", ["recursion", "padded", "packed"])
def test_every_way_takes_the_same_step(trees, kind, other):
    """Of 20 trees: gradients of layers are means over messages, so they are scaled alike first."""
    made, _ = trees.make_data(1, 20, 1)
    wanted = {name: each.double() for name, each in trees.make_modules(0, 8).items()}
    mine = deepcopy(wanted)
    way = trees.make(other, wanted, made, 1e-3, 20, 1)
    way.differentiate(made)
    graph = trees.make_graph(mine, made, 1e-3, 10**6, kind)
    executor = Static(graph, 7)
    executor.run(trees.enter(made, at) for at in range(20))
    for name, layer in graph.layers.items():
        # Adam's first moment after one step: 0.1 of the gradient
        count = sum(layer.staleness.values())
        for w, v in zip(layer.parameters, wanted[name].parameters(), strict=True):
            found = layer.optimizer.state[w]["exp_avg"] / 0.1 * count / 20
            assert (found - v.grad).abs().max() < 1e-12


def test_padding_is_counted(trees):
    made, _ = trees.make_data(1, 20, 1)
    network = trees.Padded(trees.make_modules(0, 8))
    with torch.no_grad():
        network(made)
    assert network.used == sum(len(tree.symbols) for tree in made)
    widest = [
        max(sum(h == level for h in tree.heights) for tree in made)
        for level in range(1 + max(tree.heights[-1] for tree in made))
    ]
    assert network.slots == 20 * sum(widest)


def test_the_graph_of_nodes_learns(trees, monkeypatch):
    """500 trees are enough to beat guessing: a fifth of the values is right by chance."""
    monkeypatch.setattr(trees, "TRAIN", 500)
    monkeypatch.setattr(trees, "TEST", 200)
    (row,) = trees.race(["together"], 32, 0, 500)
    assert row["trees"] == 500
    assert row["curve"][-1] > 0.3
    assert row["most_active"] == 64
