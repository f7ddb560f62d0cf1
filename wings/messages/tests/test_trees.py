"""What the documentation shows of graphs of nodes learns."""

import importlib
import re
from pathlib import Path

import pytest

from hybrid_messages import Static

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def trees(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")
    return importlib.import_module("expression_trees")


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


def test_the_page_on_messages_does_what_it_says():
    """Two seconds of training: its graph of nodes learns parity."""
    text = (DOCS / "messages.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    names = {"__name__": "messages_page"}
    exec(compile(code, "messages.md", "exec"), names)
    assert names["right"] > 90
    assert names["executor"].most_active == 8
