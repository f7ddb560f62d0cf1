"""CONTRIBUTING.md names the tests that prove each promise; `make test` runs them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## Promises and their tests")[2]
ROWS = re.findall(r"^\| (?!Promise|-)(.+?) \| (.+) \|$", SECTION, re.MULTILINE)


def nightly(file):
    """Whether each test of a file is left to `make test-slow`, by its name."""
    tree = ast.parse((ROOT / file).read_text())
    marks = [node for node in tree.body if "pytestmark" in ast.unparse(node).split(" = ")]
    all_slow = any("mark.slow" in ast.unparse(node) for node in marks)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: all_slow
        or any(ast.unparse(mark) == "pytest.mark.slow" for mark in function.decorator_list)
        for function in functions
    }


def test_every_promise_has_tests_that_are_there_and_run_every_day():
    assert len(ROWS) >= 10
    for promise, tests in ROWS:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, promise
        for file, name in named:
            assert nightly(file).get(name) is False, f"{promise}: {file}::{name}"
