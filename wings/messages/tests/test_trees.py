"""The example of docs/: its graph of nodes is a recursion, and learns."""

import importlib
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from hybrid_messages import Static

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def trees(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")
    return importlib.import_module("expression_trees")


def test_a_step_of_the_graph_is_that_of_the_recursion(trees):
    """Of 20 trees: gradients of layers are means over messages, so they are scaled alike first."""
    data, _ = trees.make_data(1, 20, 1)
    recursive = {name: each.double() for name, each in trees.make_modules(0, 8).items()}
    by_nodes = deepcopy(recursive)

    def value(tree, at):
        symbol, pair = tree.symbols[at], tree.children[at]
        if pair is None:
            return recursive["leaf"](torch.tensor(symbol))
        cell = recursive[list(trees.OPERATORS)[symbol]]
        return cell(torch.stack([value(tree, child) for child in pair]))

    for tree in data:
        logits = recursive["head"](value(tree, len(tree.symbols) - 1))
        (nn.functional.cross_entropy(logits, torch.tensor(tree.value)) / 20).backward()
    graph = trees.make_graph(by_nodes, data, 1e-3, 10**6)
    Static(graph, 7).run(trees.enter(data, at) for at in range(20))
    for name, layer in graph.layers.items():
        # Adam's first moment after one step: 0.1 of the gradient
        count = sum(layer.staleness.values())
        for w, v in zip(layer.parameters, recursive[name].parameters(), strict=True):
            gradient = layer.optimizer.state[w]["exp_avg"] / 0.1 * count / 20
            assert (gradient - v.grad).abs().max() < 1e-12


def test_the_graph_of_nodes_learns(trees):
    """500 trees are enough to beat guessing: a fifth of the values is right by chance."""
    data, tests = trees.make_data(0, 500, 200)
    both = [*data, *tests]
    executor = Static(trees.make_graph(trees.make_modules(0, 32), both, 5e-3, 32), 64)
    executor.run(trees.enter(both, at) for at in range(500))
    outcomes = executor.run((trees.enter(both, at) for at in range(500, 700)), learn=False)
    right = [int(each.output.argmax()) == both[each.state.instance].value for each in outcomes]
    assert sum(right) > 0.3 * len(tests)
    assert executor.most_active == 64
