"""AMPNet's kinds of tasks as graphs of messages, beside mini-batches; and replicas of a layer.

    python docs/benchmarks/messages.py accuracy [--seeds 0 1] [--rows "lists"]
    python docs/benchmarks/messages.py replicas
    python docs/benchmarks/messages.py accuracy replicas --only-collect

The tasks are those of message_tasks.py. A layer steps when 16 samples' messages have come, and
mini-batches have 16 samples: lists of one length, all nodes of one height of the trees, all nodes
of the graphs at once. Adam, one learning rate a task, 1,000 held-out samples, one thread.

The graph's clock is simulated: every node has a processor of its own, on which a message takes the
microseconds of its torch operations, forward, backward and again forward where the weights have
changed, and a step those of the optimizer (medians of 100, measured alone, kept in the JSON). A
node that only routes takes 1 microsecond, and edges none; what Python takes is left out. Samples a
second of mini-batches, and of the executor in one process, are per second of processor time.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import mean, median
from time import thread_time
from typing import Any, NamedTuple

import measuring
import torch
from message_tasks import TASKS, Modules, Task
from torch import nn

from hybrid_messages import Graph, Layer, Message, Static
from hybrid_messages.node import Letter

RAW = measuring.Raw(__file__)
SIZE, HELD = 16, 1_000


class Plan(NamedTuple):
    """How long a task trains at most, how often it is tested, and the accuracy to reach."""

    samples: int
    between: int
    target: float


PLANS = {
    "lists": Plan(4_000, 500, 0.45),
    "trees": Plan(4_000, 250, 0.90),
    "graphs": Plan(1_200, 100, 0.90),
}


@dataclass(frozen=True)
class Row:
    """One training."""

    task: str
    replicas: int = 0
    """Of the heavy layer, as nodes; 0: it is one node, and no replica."""
    average: int = 8
    keys: int = 16
    """Instances at a time; 0: mini-batches."""


def rows() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""
    for task in TASKS:
        yield f"{task}, mini-batches", Row(task, keys=0)
        yield f"{task}, messages", Row(task)
    for replicas, average in ((4, 8), (2, 8), (4, 1), (4, 64)):
        title = f"lists, messages, {replicas} replicas, a mean every {average}"
        yield title, Row("lists", replicas, average, keys=8 * replicas)


class Costs(NamedTuple):
    """Microseconds of a layer."""

    forward: int
    backward: int
    step: int


class Timed(Static):
    """`Static` on a clock of microseconds, with the busy time of each layer."""

    def __init__(self, graph: Graph, keys: int, costs: dict[str, Costs]) -> None:
        super().__init__(graph, keys)
        self.costs = costs
        self.busy: Counter[str] = Counter()

    def _handle(
        self, node: int, forward: bool, messages: Sequence[Message]
    ) -> tuple[int, Sequence[Letter]]:
        layer, name = self.graph.nodes[node], self.graph.names[node]
        if not isinstance(layer, Layer):
            return super()._handle(node, forward, messages)
        fresh, updates = layer.staleness[0], layer.updates
        _, letters = super()._handle(node, forward, messages)
        cost = self.costs[name.partition(".")[0]]
        ticks = cost.forward if forward else cost.backward
        if not forward:
            ticks += cost.forward * (layer.staleness[0] == fresh)
            ticks += cost.step * (layer.updates - updates)
        self.busy[name] += ticks
        return ticks, letters


def costs_of(task: Task) -> dict[str, Costs]:
    """What each layer takes for a message of the task's first samples."""
    modules = task.modules(0)
    inputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: inputs.setdefault(name, given[0].detach().clone())
        )
        for name, module in modules.items()
    ]
    Static(task.graph(modules, SIZE)).run(map(task.enter, range(50)))
    for hook in hooks:
        hook.remove()
    return {name: cost_of(module, inputs[name]) for name, module in modules.items()}


def cost_of(module: nn.Module, x: torch.Tensor) -> Costs:
    optimizer = torch.optim.Adam(module.parameters(), 0.0)
    times: list[tuple[float, ...]] = []
    for _ in range(100):
        given = x.clone().requires_grad_(x.is_floating_point())
        moments = [thread_time()]
        y = module(given)
        moments.append(thread_time())
        torch.autograd.backward([y], [torch.ones_like(y)])
        moments.append(thread_time())
        optimizer.step()
        optimizer.zero_grad()
        moments.append(thread_time())
        times.append(tuple(b - a for a, b in pairwise(moments)))
    return Costs(*(round(1e6 * median(each)) for each in zip(*times, strict=True)))


def costs_in_json(name: str, task: Task) -> dict[str, Costs]:
    if not RAW.get("costs", name):
        table = {layer: cost._asdict() for layer, cost in costs_of(task).items()}
        RAW.keep("costs", name, value=table)
    return {layer: Costs(**cost) for layer, cost in RAW.get("costs", name).items()}


def tested(task: Task, modules: Modules, first: int) -> float:
    """The share of held-out rows whose class is right; both forms compute the same numbers."""
    right: list[float] = []
    with torch.no_grad():
        for numbers in task.batches(range(first, first + HELD), HELD):
            logits, classes = task.logits(modules, numbers)
            right += (logits.argmax(-1) == classes).double().tolist()
    return mean(right)


def by_messages(row: Row, task: Task, seed: int, costs: dict[str, Costs]) -> dict[str, Any]:
    """Train until the target, or to the end, through a graph."""
    plan, modules = PLANS[row.task], task.modules(seed)
    graph = task.graph(modules, SIZE, row.replicas, row.average)
    executor, curve, seconds = Timed(graph, row.keys, costs), [], 0.0
    for first in range(0, plan.samples, plan.between):
        begun = thread_time()
        executor.run(map(task.enter, range(first, first + plan.between)))
        seconds += thread_time() - begun
        curve.append((first + plan.between, tested(task, modules, plan.samples)))
        if curve[-1][1] >= plan.target:
            break
    late = Counter[int]()
    for layer in graph.layers.values():
        late.update(layer.staleness)
    return {
        "curve": curve,
        "per_second": curve[-1][0] / seconds,
        "simulated_per_second": 1e6 * curve[-1][0] / executor.ticks,
        "busy": {name: busy / executor.ticks for name, busy in executor.busy.items()},
        "late": sum(k * v for k, v in late.items()) / sum(late.values()),
    }


def by_batches(row: Row, task: Task, seed: int) -> dict[str, Any]:
    """The same in mini-batches."""
    plan, modules = PLANS[row.task], task.modules(seed)
    weights = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.Adam(weights, task.rate)
    curve: list[tuple[int, float]] = []
    seen, seconds, begun = 0, 0.0, thread_time()
    for numbers in task.batches(range(plan.samples), SIZE):
        loss = nn.functional.cross_entropy(*task.logits(modules, numbers))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(numbers)
        if seen >= (len(curve) + 1) * plan.between:
            seconds += thread_time() - begun
            curve.append((seen, tested(task, modules, plan.samples)))
            if curve[-1][1] >= plan.target:
                break
            begun = thread_time()
    return {"curve": curve, "per_second": curve[-1][0] / seconds}


def accuracies(options: Namespace) -> None:
    tasks: dict[str, Task] = {}
    for title, row in () if options.only_collect else measuring.chosen(rows(), options):
        for seed in options.seeds:
            if RAW.get("accuracy", title, str(seed)):
                continue
            if row.task not in tasks:
                tasks[row.task] = TASKS[row.task](PLANS[row.task].samples + HELD)
            task = tasks[row.task]
            if row.keys:
                value = by_messages(row, task, seed, costs_in_json(row.task, task))
            else:
                value = by_batches(row, task, seed)
            RAW.keep("accuracy", title, str(seed), value=value)
    results = RAW.get("accuracy")
    measuring.show(
        "run | samples to the target | accuracy there, % | samples/s | simulated | processors busy,"
        " % | updates late | seeds",
        (cells(title, row, results[title]) for title, row in rows() if title in results),
    )


def cells(title: str, row: Row, by_seed: dict[str, dict[str, Any]]) -> tuple[object, ...]:
    runs, target = [*by_seed.values()], PLANS[row.task].target
    samples = [
        f"{n:,}" if accuracy >= target else f"over {n:,}"
        for n, accuracy in (run["curve"][-1] for run in runs)
    ]
    accuracy = measuring.spread([100 * run["curve"][-1][1] for run in runs])
    rate = f"{mean(run['per_second'] for run in runs):,.0f}"
    if not row.keys:
        return title, "; ".join(samples), accuracy, rate, "", "", "", len(runs)
    simulated = f"{mean(run['simulated_per_second'] for run in runs):,.0f}"
    busy = [
        f"{name} {100 * mean(run['busy'][name] for run in runs):.0f}" for name in runs[0]["busy"]
    ]
    late = f"{mean(run['late'] for run in runs):.2f}"
    return title, "; ".join(samples), accuracy, rate, simulated, ", ".join(busy), late, len(runs)


def replicas(options: Namespace) -> None:
    """What replicas of the cell do to the simulated rate, on a few samples."""
    for name, samples in () if options.only_collect else (("lists", 200), ("graphs", 60)):
        task = TASKS[name](samples)
        for keys, count in product((4, 16, 64), (0, 2, 4, 8)):
            title = f"{name}, {count or 1} nodes of the cell, {keys} at a time"
            if options.rows in title and not RAW.get("replicas", title):
                graph = task.graph(task.modules(0), SIZE, count, 8)
                executor = Timed(graph, keys, costs_in_json(name, task))
                executor.run(map(task.enter, range(samples)))
                busy = {node: each / executor.ticks for node, each in executor.busy.items()}
                rate = 1e6 * samples / executor.ticks
                RAW.keep("replicas", title, value={"simulated_per_second": rate, "busy": busy})
    measuring.show(
        "samples/s, simulated | rate | cells busy, mean, % | others",
        (
            (title, f"{each['simulated_per_second']:,.0f}", *busy_cells(each["busy"]))
            for title, each in RAW.get("replicas").items()
        ),
    )


def busy_cells(busy: dict[str, float]) -> tuple[str, str]:
    cells = mean(share for name, share in busy.items() if name.startswith("cell"))
    others = [f"{k} {100 * v:.0f}" for k, v in busy.items() if not k.startswith("cell")]
    return f"{100 * cells:.0f}", ", ".join(others)


def main() -> None:
    tables = {"accuracy": accuracies, "replicas": replicas}
    grid = {**measuring.GRID, "seeds": [0, 1]}
    options = measuring.options(__doc__, tables=tables, **grid)
    torch.set_num_threads(1)
    for name in options.tables or tables:
        tables[name](options)


if __name__ == "__main__":
    main()
