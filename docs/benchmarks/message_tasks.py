"""Three tasks whose networks depend on the sample, as graphs of messages and in mini-batches.

Lists: reduce up to ten digits by one of four operations, by a recurrent network. Trees: the value
of an expression (docs/examples/expression_trees.py), by a recursive one. Graphs: where a walk along
edges of two types leads, by a gated graph network. Both forms of a task have the same modules.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_messages import (
    Bcast,
    Entry,
    Graph,
    Group,
    Layer,
    Loop,
    Loss,
    Node,
    Outcome,
    Phi,
    Source,
    replicated,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import expression_trees as trees

Modules = Mapping[str, nn.Module]


class At(NamedTuple):
    """A message's place: a turn, the number of an element, and what it carries."""

    instance: int
    turn: int = 0
    element: int = 0
    part: str = "h"


class Task(ABC):
    """Samples by number, and a network for them."""

    rate: float
    heavy: str
    """The layer with most to compute, which may have replicas."""
    per_sample: Mapping[str, float]
    """Messages of each layer, on average."""

    @abstractmethod
    def modules(self, seed: int) -> Modules:
        """New weights."""

    @abstractmethod
    def wiring(self) -> tuple[dict[str, Node], list[tuple[str, str]]]:
        """Nodes beside the layers, and edges; an edge from the heavy layer starts at its "out"."""

    @abstractmethod
    def enter(self, number: int) -> list[Entry]:
        """What a sample sends into the graph."""

    @abstractmethod
    def target(self, at: Any) -> int:
        """The class that a message which comes to the loss should have."""

    @abstractmethod
    def logits(self, modules: Modules, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of a mini-batch: outputs by row, and their classes."""

    def batches(self, numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
        """Mini-batches of samples."""
        return (numbers[i : i + size] for i in range(0, len(numbers), size))

    def graph(self, modules: Modules, every: int, replicas: int = 0, average: int = 1) -> Graph:
        """A layer steps when it has the messages that `every` samples bring it on average."""

        def adam(weights: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(weights, self.rate)

        nodes, edges = self.wiring()
        for name, module in modules.items():
            frequency = max(1, round(every * self.per_sample[name]))
            if name == self.heavy and replicas:
                share = max(1, round(frequency / replicas))
                more = replicated(name, module, adam, replicas, share, average)
                nodes, edges = {**nodes, **more[0]}, [*edges, *more[1]]
            else:
                nodes[name] = Layer(module, adam(module.parameters()), frequency)
        if replicas:
            heavy = (self.heavy, f"{self.heavy}.out")
            edges = [(heavy[1] if a == heavy[0] else a, b) for a, b in edges]
        nodes["loss"] = Loss(nn.functional.cross_entropy, lambda at: torch.tensor(self.target(at)))
        return Graph(nodes, edges)

    def right(self, outcomes: Sequence[Outcome]) -> float:
        """The share of outcomes with the right class."""
        return mean(int(o.output.argmax()) == self.target(o.state) for o in outcomes)


class Cell(nn.Module):
    """(..., h and x, width) -> (..., width): z h + (1 - z) tanh(W [h, x]), with a gate z."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        nn.init.ones_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        both, z = x.flatten(-2), self.gate(x.flatten(-2)).sigmoid()
        return z * x[..., 0, :] + (1 - z) * self.new(both).tanh()


class Lists(Task):
    """A token tells the operation, then come 1 to 10 digits; batches have lists of one length."""

    rate, heavy, width = 3e-3, "cell", 128

    def __init__(self, count: int) -> None:
        draws = np.random.default_rng(0)
        self.tokens: list[Tensor] = []
        self.classes: list[int] = []
        for _ in range(count):
            digits = draws.integers(10, size=draws.integers(1, 11))
            operation = int(draws.integers(4))
            self.tokens.append(torch.tensor([10 + operation, *digits]))
            self.classes.append(self.reduce(operation, digits))
        length = mean(map(len, self.tokens))
        self.per_sample = {"embed": length, "cell": length, "head": 1}

    @staticmethod
    def reduce(operation: int, digits: Any) -> int:
        """Mean, difference of the means of even and odd places, range, or length, modulo 10."""
        odd = digits[1::2].mean() if len(digits) > 1 else 0
        values = (digits.mean(), digits[::2].mean() - odd, np.ptp(digits), len(digits))
        return int(np.floor(values[operation])) % 10

    def modules(self, seed: int) -> Modules:
        torch.manual_seed(seed)
        return {
            "embed": nn.Embedding(14, self.width),
            "cell": Cell(self.width),
            "head": nn.Linear(self.width, 10),
        }

    def wiring(self) -> tuple[dict[str, Node], list[tuple[str, str]]]:
        nodes = {
            "in": Source(),
            "tokens": Source(),
            "loop": Loop(
                lambda at: at.turn == len(self.tokens[at.instance]),
                lambda at: At(at.instance, at.turn + 1),
            ),
            "either": Phi(2),
            "both": Group(
                lambda at: at._replace(part="both"),
                lambda at: [at._replace(part="h"), at._replace(part="x")],
            ),
        }
        edges = [
            *[("in", "loop"), ("tokens", "embed"), ("loop:0", "either"), ("embed", "either:1")],
            *[("either", "both"), ("both", "cell"), ("cell", "loop:1")],
            *[("loop:1", "head"), ("head", "loss")],
        ]
        return nodes, edges

    def enter(self, number: int) -> list[Entry]:
        tokens = self.tokens[number]
        given = [Entry("tokens", At(number, t, 0, "x"), x) for t, x in enumerate(tokens, 1)]
        return [Entry("in", At(number), torch.zeros(self.width)), *given]

    def target(self, at: At) -> int:
        return self.classes[at.instance]

    def batches(self, numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
        waiting: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            bucket = waiting[len(self.tokens[number])]
            bucket.append(number)
            if len(bucket) == size:
                yield [*bucket]
                bucket.clear()
        yield from (bucket for bucket in waiting.values() if bucket)

    def logits(self, modules: Modules, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        x = modules["embed"](torch.stack([self.tokens[number] for number in numbers]))
        h = torch.zeros(len(numbers), self.width)
        for token in x.unbind(1):
            h = modules["cell"](torch.stack([h, token], 1))
        return modules["head"](h), torch.tensor([self.classes[number] for number in numbers])


class Trees(Task):
    """Expressions over five digits; a mini-batch computes all nodes of one height at once."""

    rate, heavy, width = 5e-3, "", 32

    def __init__(self, count: int) -> None:
        draws = np.random.default_rng(0)
        self.trees = [trees.make_tree(draws, most_leaves=6) for _ in range(count)]
        leaves = mean(sum(pair is None for pair in tree.children) for tree in self.trees)
        inner = (leaves - 1) / len(trees.OPERATORS)
        self.per_sample = {"leaf": leaves, **dict.fromkeys(trees.OPERATORS, inner), "head": 1}

    def modules(self, seed: int) -> Modules:
        return trees.make_modules(seed, self.width)

    def graph(self, modules: Modules, every: int, replicas: int = 0, average: int = 1) -> Graph:
        return trees.make_graph(modules, self.trees, self.rate, every)

    def wiring(self) -> Any:
        raise NotImplementedError

    def enter(self, number: int) -> list[Entry]:
        return trees.enter(self.trees, number)

    def target(self, at: Any) -> int:
        return self.trees[at.instance].value

    def logits(self, modules: Modules, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        leaves: list[tuple[int, int]] = []
        levels: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
        roots, first, names = [], 0, [*trees.OPERATORS]
        for tree in (self.trees[number] for number in numbers):
            heights: list[int] = []
            for at, (symbol, pair) in enumerate(zip(tree.symbols, tree.children, strict=True)):
                if pair is None:
                    heights.append(0)
                    leaves.append((first + at, symbol))
                else:
                    heights.append(1 + max(heights[child] for child in pair))
                    nodes = (first + at, first + pair[0], first + pair[1])
                    levels[heights[-1], names[symbol]].append(nodes)
            first += len(tree.symbols)
            roots.append(first - 1)
        place = torch.empty(first, dtype=torch.int64)
        at, symbols = torch.tensor(leaves).unbind(1)
        place[at], rows = torch.arange(len(leaves)), modules["leaf"](symbols)
        for _, group in groupby(sorted(levels), key=lambda level: level[0]):
            made, begun = [rows], len(rows)
            for key in group:
                at, left, right = torch.tensor(levels[key]).unbind(1)
                made.append(
                    modules[key[1]](torch.stack([rows[place[left]], rows[place[right]]], 1))
                )
                place[at] = torch.arange(begun, begun + len(at))
                begun += len(at)
            rows = torch.cat(made)
        values = torch.tensor([self.trees[number].value for number in numbers])
        return modules["head"](rows[place[roots]]), values


class Graphs(Task):
    """Nodes have a label, and an edge of two types out and in; the class is the label two edges on.

    The walk takes an edge of type 0, then one of type 1. A message goes against an edge, so two
    turns bring the label home. A mini-batch is one graph of all its nodes.
    """

    rate, heavy, width, labels, turns = 2e-3, "cell", 64, 8, 2

    def __init__(self, count: int) -> None:
        draws = np.random.default_rng(0)
        self.label: list[Any] = []
        self.edges: list[Any] = []
        """[type, node] -> node."""
        for _ in range(count):
            size = int(draws.integers(3, 9))
            self.label.append(draws.integers(self.labels, size=size).tolist())
            self.edges.append([draws.permutation(size).tolist() for _ in range(2)])
        self.back = [[np.argsort(e).tolist() for e in edges] for edges in self.edges]
        size = mean(map(len, self.label))
        per_turn = dict.fromkeys(("type0", "type1", "cell"), self.turns * size)
        self.per_sample = {"embed": size, **per_turn, "head": size}

    def modules(self, seed: int) -> Modules:
        torch.manual_seed(seed)
        return {
            "embed": nn.Embedding(self.labels, self.width),
            "type0": nn.Linear(self.width, self.width),
            "type1": nn.Linear(self.width, self.width),
            "cell": Gated(self.width),
            "head": nn.Linear(self.width, self.labels),
        }

    def wiring(self) -> tuple[dict[str, Node], list[tuple[str, str]]]:
        def renamed(part: str, edge: int) -> Group:
            """A message of the node that it goes to; `whole` of a state is another state."""

            def goes(at: At) -> At:
                to = at.element if edge < 0 else self.back[at.instance][edge][at.element]
                return At(at.instance, at.turn, to, part)

            def came(at: At) -> list[At]:
                of = at.element if edge < 0 else self.edges[at.instance][edge][at.element]
                return [At(at.instance, at.turn, of)]

            return Group(goes, came)

        parts = "state", "from0", "from1"
        nodes = {
            "in": Source(),
            "loop": Loop(
                lambda at: at.turn == self.turns,
                lambda at: At(at.instance, at.turn + 1, at.element),
            ),
            "copies": Bcast(3),
            **{part: renamed(part, number - 1) for number, part in enumerate(parts)},
            "any": Phi(3),
            "all": Group(
                lambda at: at._replace(part="all"),
                lambda at: [at._replace(part=part) for part in parts],
            ),
        }
        edges = [
            *[("in", "embed"), ("embed", "loop"), ("loop:0", "copies"), ("copies:0", "state")],
            *[("copies:1", "type0"), ("type0", "from0"), ("copies:2", "type1"), ("type1", "from1")],
            *[(part, f"any:{number}") for number, part in enumerate(parts)],
            *[("any", "all"), ("all", "cell"), ("cell", "loop:1")],
            *[("loop:1", "head"), ("head", "loss")],
        ]
        return nodes, edges

    def enter(self, number: int) -> list[Entry]:
        labels = torch.tensor(self.label[number])
        return [Entry("in", At(number, 0, node), x) for node, x in enumerate(labels)]

    def target(self, at: At) -> int:
        edges = self.edges[at.instance]
        return int(self.label[at.instance][edges[1][edges[0][at.element]]])

    def logits(self, modules: Modules, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        labels, first = [], 0
        edges: tuple[list[int], list[int]] = ([], [])
        for number in numbers:
            labels += self.label[number]
            for to, of_one in zip(edges, self.edges[number], strict=True):
                to += [first + node for node in of_one]
            first += len(self.label[number])
        one, two = map(torch.tensor, edges)
        start = torch.tensor(labels)
        h = modules["embed"](start)
        for _ in range(self.turns):
            parts = h, modules["type0"](h)[one], modules["type1"](h)[two]
            h = modules["cell"](torch.stack(parts, 1)[:, :, None])
        return modules["head"](h), start[two[one]]


class Gated(nn.Module):
    """(..., 3 parts, 1, width) -> (..., width): a gated recurrent unit on the messages' sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates, self.new = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, first, second = x.squeeze(-2).unbind(-2)
        message = first + second
        z, r = self.gates(torch.cat([h, message], -1)).sigmoid().chunk(2, -1)
        return z * h + (1 - z) * self.new(torch.cat([r * h, message], -1)).tanh()


TASKS: dict[str, Callable[[int], Task]] = {"lists": Lists, "trees": Trees, "graphs": Graphs}
