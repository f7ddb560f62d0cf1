"""The tasks of docs/benchmarks are the same network as a graph of messages and in mini-batches."""

import importlib
from pathlib import Path

import pytest
import torch

from hybrid_messages import Static

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def tasks(monkeypatch):
    for folder in "examples", "benchmarks":
        monkeypatch.syspath_prepend(DOCS / folder)
    return importlib.import_module("message_tasks").TASKS


@pytest.mark.parametrize("name", ["lists", "trees", "graphs"])
def test_messages_and_mini_batches_compute_the_same(tasks, name):
    task = tasks[name](40)
    modules = {key: module.double() for key, module in task.modules(0).items()}
    executor = Static(task.graph(modules, 4), 8)

    def enter(number):
        return [
            e._replace(payload=e.payload.double() if e.payload.is_floating_point() else e.payload)
            for e in task.enter(number)
        ]

    for learn in False, True:  # before and after steps
        outcomes = executor.run(map(enter, range(40)), learn=False)
        outcomes.sort(key=lambda each: (each.state.instance, getattr(each.state, "element", 0)))
        found = torch.stack([each.output for each in outcomes])
        for numbers in task.batches(range(40), 40):
            logits, classes = task.logits(modules, numbers)
            rows = [i for i, each in enumerate(outcomes) if each.state.instance in set(numbers)]
            rows.sort(key=lambda i: numbers.index(outcomes[i].state.instance))
            assert (found[rows] - logits).abs().max() < 1e-9
            assert [task.target(outcomes[i].state) for i in rows] == classes.tolist()
        if not learn:
            executor.run(map(enter, range(40)))


def test_replicas_of_the_lists_cell_are_equal_after_a_run(tasks):
    task = tasks["lists"](40)
    graph = task.graph(task.modules(0), 4, replicas=3)
    Static(graph, 8).run(map(task.enter, range(40)))
    first, *others = ([*graph.layers[f"cell.{way}"].module.parameters()] for way in range(3))
    for other in others:
        assert all(map(torch.equal, first, other))
    assert min(graph.layers[f"cell.{way}"].updates for way in range(3)) > 1
