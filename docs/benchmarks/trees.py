"""Expression trees: messages through a graph of nodes against padding, in time to a target.

    python docs/benchmarks/trees.py measure     all ways by turns, into trees.json
    python docs/benchmarks/trees.py train --how messages --widths 32 --seeds 0
    python docs/benchmarks/trees.py table

Trees, network and graph are those of docs/examples/expression_trees.py. All ways train the same
modules from the same weights on the same trees in the same order with Adam, a step of a layer (of
the whole network, without messages) every 32 trees or as many messages as these bring; they take
turns of 500 trees, and the clock stands still while held-out trees are evaluated, which is done
alike for all. Rows that the JSON holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_messages import Layer, Static, Together

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from expression_trees import (
    OPERATORS,
    TARGET,
    Tree,
    enter,
    make_data,
    make_graph,
    make_modules,
)
from trees_in_batches import Packed, Padded

FILE = Path(__file__).with_name("trees.json")


class Messages:
    """The graph of nodes."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        trees: Sequence[Tree],
        rate: float,
        every: int,
        *,
        active: int,
        kind: type[Layer] = Layer,
    ) -> None:
        self.trees = trees
        graph = make_graph(modules, trees, rate, every, kind)
        self.executor = Static(graph, active)

    def train(self, chosen: Sequence[int]) -> None:
        self.executor.run(enter(self.trees, at) for at in chosen)

    def told(self) -> dict[str, Any]:
        """What is said of a run at its end."""
        layers = self.executor.graph.layers
        return {
            "most_active": self.executor.most_active,
            "updates": {name: layer.updates for name, layer in layers.items()},
            "staleness": {
                name: {str(late): layer.staleness[late] for late in sorted(layer.staleness)}
                for name, layer in layers.items()
            },
        }


class Plain:
    """One optimizer over all modules, a step with the mean gradient of a batch."""

    def __init__(
        self, modules: Mapping[str, nn.Module], trees: Sequence[Tree], rate: float, every: int
    ) -> None:
        self.modules, self.trees, self.every = modules, trees, every
        self.optimizer = torch.optim.Adam(
            [w for m in modules.values() for w in m.parameters()], rate
        )
        self.updates = 0

    def train(self, chosen: Sequence[int]) -> None:
        for first in range(0, len(chosen), self.every):
            self.differentiate([self.trees[at] for at in chosen[first : first + self.every]])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1

    def differentiate(self, batch: Sequence[Tree]) -> None:
        """One tree at a time, by its recursion."""
        for tree in batch:
            vectors: list[Tensor] = []
            for symbol, pair in zip(tree.symbols, tree.children, strict=True):
                if pair is None:
                    vectors.append(self.modules["leaf"](torch.tensor(symbol)))
                else:
                    cell = self.modules[list(OPERATORS)[symbol]]
                    vectors.append(cell(torch.stack([vectors[child] for child in pair])))
            scores = self.modules["head"](vectors[-1])
            loss = nn.functional.cross_entropy(scores, torch.tensor(tree.value))
            (loss / len(batch)).backward()

    def told(self) -> dict[str, Any]:
        return {"updates": self.updates}


class InBatches(Plain):
    """A whole batch at a time."""

    def __init__(self, network: type[Padded] | type[Packed], *given: Any) -> None:
        super().__init__(*given)
        self.network = network(self.modules)

    def differentiate(self, batch: Sequence[Tree]) -> None:
        values = torch.tensor([tree.value for tree in batch])
        nn.functional.cross_entropy(self.network(batch), values).backward()

    def told(self) -> dict[str, Any]:
        told = super().told()
        if isinstance(self.network, Padded):
            told["padding"] = 1 - self.network.used / self.network.slots
        return told


def make(
    how: str,
    modules: Mapping[str, nn.Module],
    trees: Sequence[Tree],
    rate: float,
    every: int,
    active: int,
) -> Messages | Plain:
    given = (modules, trees, rate, every)
    match how:
        case "messages":
            return Messages(*given, active=active)
        case "together":
            return Messages(*given, active=active, kind=Together)
        case "recursion":
            return Plain(*given)
        case "padded":
            return InBatches(Padded, *given)
        case "packed":
            return InBatches(Packed, *given)
    raise ValueError(how)


HOWS: Mapping[str, int] = {
    # active instances
    "messages": 16,
    "together": 64,
    "recursion": 1,
    "padded": 32,
    "packed": 32,
}
RATES = {32: 5e-3, 128: 2e-3}
"""Of Adam, by width: 3e-3 to 1e-2 did alike in a trial of `padded` at width 32."""
EVERY, TURN, TRAIN, TEST = 32, 500, 30_000, 1_000


@dataclass
class Race:
    """One way on its way to the target."""

    how: str
    way: Messages | Plain
    network: Packed
    held: Sequence[Tree]
    seconds: float = 0
    cpu_seconds: float = 0
    trees: int = 0

    def __post_init__(self) -> None:
        self.curve: list[float] = []

    def turn(self, chosen: Sequence[int]) -> bool:
        """Some more trees; whether the target is reached."""
        wall, cpu = perf_counter(), process_time()
        self.way.train(chosen)
        self.seconds += perf_counter() - wall
        self.cpu_seconds += process_time() - cpu
        self.trees += len(chosen)
        with torch.no_grad():
            right = self.network(self.held).argmax(1) == torch.tensor([t.value for t in self.held])
        self.curve.append(float(right.float().mean()))
        return self.curve[-1] >= TARGET

    def row(self, width: int, seed: int) -> dict[str, Any]:
        told = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "trees": self.trees}
        start = {"how": self.how, "width": width, "seed": seed}
        return {**start, **told, "curve": self.curve, **self.way.told()}


def race(hows: Sequence[str], width: int, seed: int, most: int) -> list[dict[str, Any]]:
    """All of them, by turns of as many trees each, until each is there or has had `most`."""
    trees, held = make_data(seed, TRAIN, TEST)
    races = []
    for how in hows:
        modules = make_modules(seed, width)
        way = make(how, modules, trees, RATES[width], EVERY, HOWS[how])
        races.append(Race(how, way, Packed(modules), held))
    running = races
    for first in range(0, most, TURN):
        running = [
            r for r in running if not r.turn([at % TRAIN for at in range(first, first + TURN)])
        ]
        for each in races:
            print(f"{each.how}: {each.curve[-1]:.3f} {each.cpu_seconds:.1f} s", end="; ")
        print(flush=True)
        if not running:
            break
    return [each.row(width, seed) for each in races]


def overlap(how: str, active: int) -> dict[str, Any]:
    """Ticks of the static form: were every node a processor, all as fast as each other."""
    trees, _ = make_data(0, TURN, 1)
    way = make(how, make_modules(0, 32), trees, RATES[32], EVERY, active)
    way.train(range(TURN))
    assert isinstance(way, Messages)
    start = {"how": how, "active": active, "trees": TURN, "ticks": way.executor.ticks}
    return {**start, **way.told()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "measure", "table"])
    parser.add_argument("--how", choices=HOWS, default="messages")
    parser.add_argument("--widths", type=int, nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--most", type=int, default=TRAIN, help="trees at most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "train":
        race([given.how], given.widths[0], given.seeds[0], given.most)
        return
    found = json.loads(FILE.read_text()) if FILE.exists() else {"races": [], "overlap": []}
    if given.command == "table":
        return print_tables(found)
    for how, active in product(["messages", "together"], [1, 4, 16, 64]):
        if (how, active) not in [(row["how"], row["active"]) for row in found["overlap"]]:
            found["overlap"].append(overlap(how, active))
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    for seed in given.seeds:
        for width in given.widths:
            there = [r["how"] for r in found["races"] if (r["width"], r["seed"]) == (width, seed)]
            hows = [how for how in HOWS if how not in there]
            if not hows:
                continue
            found["races"] += race(hows, width, seed, given.most)
            FILE.write_text(json.dumps(found, indent=1) + "\n")


def print_tables(found: Mapping[str, Any]) -> None:
    for width in RATES:
        for how in HOWS:
            rows = [r for r in found["races"] if (r["how"], r["width"]) == (how, width)]
            if not rows:
                continue
            there = [r for r in rows if r["curve"][-1] >= TARGET]
            base = {
                r["seed"]: r for r in found["races"] if (r["how"], r["width"]) == ("padded", width)
            }
            cells = [
                f"{len(there)} of {len(rows)}",
                spread([r["trees"] for r in rows], 0),
                spread([r["cpu_seconds"] for r in rows], 1),
                spread([r["seconds"] for r in rows], 1),
                spread([r["cpu_seconds"] / base[r["seed"]]["cpu_seconds"] for r in rows], 1),
                spread([1000 * r["cpu_seconds"] / r["trees"] for r in rows], 2),
            ]
            print(f"| {width} | {how} |", " | ".join(cells), "|", late(rows))
    for row in found["overlap"]:
        print(row["how"], row["active"], row["ticks"] / row["trees"], late([row]))


def spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{mean(values):.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"


def late(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean and largest staleness of every layer."""
    said = []
    for name in rows[0].get("staleness", {}):
        counts: dict[int, int] = {}
        for row in rows:
            for key, count in row["staleness"][name].items():
                counts[int(key)] = counts.get(int(key), 0) + count
        average = sum(key * count for key, count in counts.items()) / sum(counts.values())
        said.append(f"{name} {average:.2f} ({max(counts)})")
    return ", ".join(said)


if __name__ == "__main__":
    main()
