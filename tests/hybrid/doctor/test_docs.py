"""The page on clusters and the doctor's lines belong together."""

import ast
import re
from pathlib import Path

from hybrid.doctor import versions

ROOT = Path(__file__).parents[3]


def subjects() -> set[str]:
    """The first words of every `Finding(...)` in the doctor's code."""
    found = set(versions.installed())
    for file in (ROOT / "hybrid" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
            if call and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
            if isinstance(node, ast.Tuple) and file.name == "storage.py" and len(node.elts) == 3:
                first = node.elts[0]
                found |= {first.value} if isinstance(first, ast.Constant) else set()
    return found - {"doctor"}


def test_every_line_of_the_doctor_stands_at_its_point_of_the_page():
    page = (ROOT / "docs" / "clusters.md").read_text()
    places = re.findall(r"\(doctor[:,]([^)]*)\)", page)
    named = {name for place in places for name in re.findall(r"`([^`]+)`", place)} - {"name"}
    assert named == subjects()
