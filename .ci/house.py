"""What the house is like, in numbers:  python .ci/house.py [--batch]

Lines by room, lines that refuse something, import arrows and circles, the files that name a few
concepts, and the words of the documentation. `--batch` trains, and counts for a few methods the
files that one mini-batch enters on one rank and how often control goes from one to another.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
CONCEPTS = ("window", "micro_batches", "sweeps", "local_budget")
RECIPES = {
    "default with local work": ["--set", "fill.name=augmented-lagrangian"],
    "ddg": ["--solver", "ddg"],
    "backprop, 2 replicas": ["--solver", "backprop", "--replicas", "2"],
}


def tracked(*patterns: str) -> list[Path]:
    """The repository's files of these patterns."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.split() if (path := ROOT / name).exists()]


def room(path: Path) -> str:
    """The folder of a file, two levels deep."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: min(2, len(parts) - 1)])


def lines(paths: list[Path]) -> int:
    """All lines of some files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def refusing_lines(path: Path) -> set[int]:
    """Lines of checks: functions that are called so, guarded raises of ValueError, refuse()."""
    numbers: set[int] = set()

    def take(node: ast.AST) -> None:
        numbers.update(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]

    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name) if re.match("_?(check|refus)", name):
                take(node)
            case ast.If(body=body) if any(map(_raises, body)):
                numbers.update(range(node.lineno, node.body[-1].end_lineno + 1))  # type: ignore[operator]
            case ast.Raise() if _raises(node):
                take(node)
            case ast.Expr(ast.Call(ast.Attribute(attr=name))) if "refuse" in name:
                take(node)
    return numbers


def _raises(node: ast.AST) -> bool:
    match node:
        case ast.Raise(exc=ast.Call(ast.Name("ValueError"))):
            return True
    return False


def arrows(paths: list[Path]) -> dict[str, set[str]]:
    """Each module, and the project's modules that it imports."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    short = partial(re.sub, r"^hybrid\.solvers\b", "solvers")  # which is a link to the folder
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                graph[name] |= {short(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {short(f"{node.module}.{alias.name}") for alias in node.names}
                graph[name] |= (inner & names.keys()) or {short(str(node.module))}
    return {name: others & names.keys() for name, others in graph.items()}


def of_folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph of folders; a package's face, its __init__.py, is apart from files beside it."""
    folders = {".".join(name.split(".")[:2]) for name in graph if name.count(".") > 1}

    def folder(module: str) -> str:
        package, *inner = module.split(".")
        name = ".".join([package, *inner[:1]])
        if inner == ["__main__"]:
            return f"{package}.cli"
        return name if not inner or name in folders else f"{package}/*.py"

    joined: dict[str, set[str]] = {folder(module): set() for module in graph}
    for module, others in graph.items():
        joined[folder(module)] |= {folder(other) for other in others} - {folder(module)}
    return joined


def floors(graph: dict[str, set[str]]) -> int:
    """The length of the longest chain of imports; 0 if there is a circle."""
    heights: dict[str, int] = {}
    try:
        for name in TopologicalSorter(graph).static_order():
            heights[name] = 1 + max((heights[other] for other in graph[name]), default=0)
    except CycleError:
        return 0
    return max(heights.values())


def has_circle(graph: dict[str, set[str]]) -> bool:
    """Whether modules, or folders, import each other in a circle."""
    return not floors(graph)


def mean_lengths(paths: list[Path]) -> dict[str, float]:
    """Characters of a line that is not empty, and lines of a function."""
    texts = [path.read_text() for path in paths]
    widths = [len(line) for text in texts for line in text.splitlines() if line.strip()]
    heights = [
        node.end_lineno - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    return {"line": round(mean(widths), 1), "function": round(mean(heights), 1)}


def prose(path: Path) -> int:
    """Words of a file."""
    return len(path.read_text().split())


def house() -> dict[str, Any]:
    """Counts that need the files alone."""
    core = tracked("hybrid/*.py", "solvers/*.py")
    wings, tests = tracked("wings/*.py"), tracked("tests/*.py")
    wing_tests = [path for path in wings if "tests" in path.parts]
    wings = [path for path in wings if path not in wing_tests]
    graph = arrows(core)
    rooms: Counter[str] = Counter()
    for path in core + wings:
        rooms[room(path)] += lines([path])
    texts = {path: path.read_text() for path in core}
    return {
        "lines": {"core": lines(core), "wings": lines(wings), "tests": lines(tests + wing_tests)},
        "lines by room": dict(sorted(rooms.items())),
        "files of the core": len(core),
        "lines that refuse": sum(len(refusing_lines(path)) for path in core),
        "import arrows": sum(map(len, graph.values())),
        "circles": has_circle(graph),
        "folders": len(folders := of_folders(graph)),
        "floors of folders": floors(folders),
        "circles of folders": has_circle(folders),
        "mean lengths": mean_lengths(core),
        "lines of docs/benchmarks": lines(tracked("docs/benchmarks/*.py")),
        "files that name": {
            word: sum(bool(re.search(rf"\b{word}\b", text)) for text in texts.values())
            for word in CONCEPTS
        },
        "words of documentation": sum(map(prose, tracked("*.md"))),
    }


def counting(argv: list[str]) -> tuple[Counter[str], int]:
    """Calls of each of the project's files, and changes of file, of one whole training."""
    from hybrid.cli.app import app

    files: Counter[str] = Counter()
    changes = Counter({"changes": 0})
    state = threading.local()
    inside = (str(ROOT / "hybrid"), str(ROOT / "solvers"))

    def profile(frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        if event == "return":
            frame = frame.f_back
            if frame is None:
                return
        file = frame.f_code.co_filename
        if not file.startswith(inside):
            return
        if event == "call":
            files[file] += 1
        if getattr(state, "file", file) != file:
            changes["changes"] += 1
        state.file = file

    threading.setprofile(profile)
    try:
        app(argv, standalone_mode=False)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return files, changes["changes"]


def of_one_batch(recipe: str) -> dict[str, float]:
    """Per rank and mini-batch: a training of 64 mini-batches less one of 32, by 32."""
    options = {"checkpoint.minutes": 0, "train.report_every": 1000}
    if "local" in recipe:
        options |= {"rounds.local_budget": "[[2,0],[0,2]]"}  # the same work on every machine
    counts = []
    for batches in (32, 64):
        with tempfile.TemporaryDirectory() as folder:
            argv = ["train", *RECIPES[recipe], "--blocks", "2", "--batch-size", "8"]
            argv += ["--epochs", "1", "--out", f"{folder}/run"]
            for name, value in (options | {"data.limit": 8 * batches}).items():
                argv += ["--set", f"{name}={value}"]
            counts.append(counting(argv))
    (calls, less), (more_calls, more) = counts
    entered = [file for file in more_calls if more_calls[file] - calls[file] >= 16]
    ranks = 4 if "replicas" in recipe else 2
    return {"files": len(entered), "changes of file": round((more - less) / 32 / ranks)}


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", action="store_true", help="train, and count one mini-batch")
    options = parser.parse_args()
    print(json.dumps(house(), indent=2))
    for recipe in RECIPES if options.batch else ():
        sys.argv = ["hybrid"]
        print(recipe, of_one_batch(recipe), file=sys.stderr)


if __name__ == "__main__":
    main()
