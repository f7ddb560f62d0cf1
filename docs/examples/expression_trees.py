"""A recursive network on expression trees, trained by messages through a graph of nodes.

    python docs/examples/expression_trees.py [--active 16]

A tree is an expression over the digits 0 to 4 with max, min and + modulo 5, of 1 to MOST_LEAVES
leaves split at random; the label is its value. Leaves become vectors (h, c), an inner node of
its children's by the gated cell of a binary Tree-LSTM (Tai et al., 2015), with weights of its own
for each operator; a linear head classifies the root. As messages every leaf enters by itself, a
Group waits for siblings, a Cond picks the operator's cell; nothing is batched or padded:

    in -> leaf -> phi -> root? -no-> siblings -> operator? -> max | min | plus -> phi
                              -yes-> head -> loss

Trained until 95 % of held-out trees are right: more than a network can reach that has not learnt
all three operators or cannot put them together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_messages import (
    Cond,
    Entry,
    Graph,
    Group,
    Layer,
    Loss,
    Phi,
    Source,
    Static,
)

DIGITS, MOST_LEAVES = 5, 12
OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "max": max,
    "min": min,
    "plus": lambda a, b: (a + b) % DIGITS,
}
TARGET = 0.95


@dataclass(frozen=True)
class Tree:
    """Nodes in post-order, the root last; a leaf has no children."""

    symbols: tuple[int, ...]
    """Digit of a leaf, operator of an inner node."""
    children: tuple[tuple[int, int] | None, ...]
    value: int

    @cached_property
    def parents(self) -> dict[int, int]:
        return {child: at for at, pair in enumerate(self.children) for child in pair or ()}


def make_tree(draws: np.random.Generator, most_leaves: int = MOST_LEAVES) -> Tree:
    symbols: list[int] = []
    children: list[tuple[int, int] | None] = []

    def grow(leaves: int) -> tuple[int, int]:
        """A subtree's place and value."""
        if leaves == 1:
            pair, symbol = None, int(draws.integers(DIGITS))
            value = symbol
        else:
            left = int(draws.integers(1, leaves))
            (a, x), (b, y) = grow(left), grow(leaves - left)
            pair, symbol = (a, b), int(draws.integers(len(OPERATORS)))
            value = list(OPERATORS.values())[symbol](x, y)
        symbols.append(symbol)
        children.append(pair)
        return len(symbols) - 1, value

    _, value = grow(int(draws.integers(1, most_leaves + 1)))
    return Tree(tuple(symbols), tuple(children), value)


def make_data(seed: int, train: int, test: int) -> tuple[list[Tree], list[Tree]]:
    """Test trees are no training trees, nor each other."""
    draws = np.random.default_rng(seed)
    trees = [make_tree(draws) for _ in range(train)]
    held = dict.fromkeys(make_tree(draws) for _ in range(4 * test))
    seen = set(trees)
    return trees, [tree for tree in held if tree not in seen][:test]


class Cell(nn.Module):
    """(..., 2 children, h and c) -> (..., h and c)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.chunk(2, -1)
        return follow(self.gates(h.flatten(-2)), c)


def follow(gates: Tensor, c: Tensor) -> Tensor:
    """The new h and c of input, output, two forget gates, and what may be written."""
    width = c.shape[-1]
    opened, written = gates[..., : 4 * width].sigmoid(), gates[..., 4 * width :].tanh()
    i, o, left, right = opened.split(width, -1)
    new = i * written + left * c[..., 0, :] + right * c[..., 1, :]
    return torch.cat([o * new.tanh(), new], -1)


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[..., : self.linear.in_features])


def make_modules(seed: int, width: int) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    cells = {name: Cell(width) for name in OPERATORS}
    return {"leaf": nn.Embedding(DIGITS, 2 * width), **cells, "head": Head(width)}


class Place(NamedTuple):
    instance: int
    node: int


def make_graph(
    modules: Mapping[str, nn.Module], trees: Sequence[Tree], rate: float, every: int
) -> Graph:
    """A layer steps when it has the messages that `every` trees bring it on average."""
    some = trees[:500]
    per_tree = {
        "leaf": mean(sum(pair is None for pair in tree.children) for tree in some),
        "head": 1.0,
    }
    inner = mean(sum(pair is not None for pair in tree.children) for tree in some)

    def layer(name: str) -> Layer:
        module = modules[name]
        messages = every * per_tree.get(name, inner / len(OPERATORS))
        return Layer(module, torch.optim.Adam(module.parameters(), rate), max(1, round(messages)))

    def siblings(place: Place) -> list[Place]:
        return [
            Place(place.instance, child) for child in trees[place.instance].children[place.node]
        ]

    nodes = {
        "in": Source(),
        "phi": Phi(1 + len(OPERATORS)),
        "root": Cond(lambda place: place.node == len(trees[place.instance].symbols) - 1),
        "siblings": Group(
            lambda place: Place(place.instance, trees[place.instance].parents[place.node]),
            siblings,
        ),
        "operator": Cond(lambda at: trees[at.instance].symbols[at.node], len(OPERATORS)),
        "loss": Loss(
            nn.functional.cross_entropy, lambda at: torch.tensor(trees[at.instance].value)
        ),
        **{name: layer(name) for name in modules},
    }
    edges = [
        *[("in", "leaf"), ("leaf", "phi"), ("phi", "root"), ("root:0", "siblings")],
        *[("siblings", "operator"), ("root:1", "head"), ("head", "loss")],
    ]
    for way, name in enumerate(OPERATORS):
        edges += [(f"operator:{way}", name), (name, f"phi:{1 + way}")]
    return Graph(nodes, edges)


def enter(trees: Sequence[Tree], instance: int) -> list[Entry]:
    tree = trees[instance]
    return [
        Entry("in", Place(instance, node), torch.tensor(tree.symbols[node]))
        for node, pair in enumerate(tree.children)
        if pair is None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--active", type=int, default=16, help="trees at a time")
    parser.add_argument("--every", type=int, default=32, help="trees' worth of messages a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trees, held = make_data(0, 30_000, 1_000)
    both = [*trees, *held]
    graph = make_graph(make_modules(0, 32), both, 5e-3, options.every)
    executor = Static(graph, options.active)
    for first in range(0, len(trees), 1_000):
        outcomes = executor.run(enter(both, at) for at in range(first, first + 1_000))
        tests = executor.run((enter(both, len(trees) + at) for at in range(1_000)), learn=False)
        right = [int(each.output.argmax()) == both[each.state.instance].value for each in tests]
        loss = mean(each.loss for each in outcomes)
        print(f"{first + 1_000} trees: loss {loss:.3f}, held out {mean(right):.1%}", flush=True)
        if mean(right) >= TARGET:
            break
    for name, layer in graph.layers.items():
        late = {late: layer.staleness[late] for late in sorted(layer.staleness)}
        print(f"{name}: {layer.updates} updates; messages by updates they were late: {late}")


if __name__ == "__main__":
    main()
