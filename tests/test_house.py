"""The rules of the house: imports run downwards, no circle, short files, methods named once."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from solvers import registry

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("hybrid", "solvers")
    for path in sorted((ROOT / package).rglob("*.py"))
}

# A room is a package, or a module that stands by itself, and imports from the rooms below it only.
# `hybrid` is the package's face, hybrid/__init__.py; `solvers` is the methods, a file each.
ROOMS = (
    *("hybrid.__main__", "hybrid.cli"),
    *("hybrid.plan", "hybrid.report", "hybrid.bench", "hybrid.doctor"),
    *("hybrid", "hybrid.rl", "hybrid.runs", "hybrid.training"),
    *("hybrid.ranks", "hybrid.folder", "hybrid.rounds", "hybrid.samplers"),
    *("hybrid.cuts", "hybrid.links", "hybrid.data", "hybrid.models"),
    *("hybrid.settings", "hybrid.samplers.registry", "hybrid.errors", "hybrid.orphans"),
    *("solvers", "solvers.registry"),
    *("solvers.passes", "solvers.base", "solvers.variables", "solvers.blocks"),
    *("solvers.windows", "solvers.sync", "solvers.state", "solvers.layers", "solvers.kernels"),
    *("solvers.messages", "solvers.named", "solvers.checks"),
)

LONGEST_FILE, FULLEST_FOLDER = 400, 12

METHODS = {name: place.partition(":") for name, place in registry.OWN.items()}
NAMES = {*METHODS, *(attribute for _, _, attribute in METHODS.values())}
HOMES = {module for module, _, _ in METHODS.values()} | {"solvers", "solvers.registry"}

# beside its own file, the registry and the package's face, a method is named by
NAMED = {
    ("hybrid.bench.recipes", "Backprop"),  # the base of every comparison is serial training
    ("solvers.passes.exact", "backprop"),  # which is this pass alone
}


@cache
def imports(module):
    """The modules of this project that a module imports, within functions and for types, too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else str(node.module))
    return frozenset(found & FILES.keys())


def room(module):
    """The innermost room that a module is in."""
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return module


def test_the_rooms_are_all_there():
    assert [name for name in ROOMS if name not in FILES] == []
    in_the_face = {name for name in FILES if room(name) == "hybrid"}
    assert in_the_face == {"hybrid"}, "a room that is missing in the table"


def test_imports_run_downwards():
    found = {
        (module, other)
        for module in FILES
        for other in imports(module)
        if ROOMS.index(room(other)) < ROOMS.index(room(module))
    }
    assert found == set()


def test_no_import_goes_in_a_circle():
    TopologicalSorter({module: imports(module) for module in FILES}).prepare()  # else CycleError


@pytest.mark.parametrize("module", FILES)
def test_a_file_is_short(module):
    assert len(FILES[module].read_text().splitlines()) <= LONGEST_FILE


def test_a_folder_is_not_crowded():
    crowd: dict[Path, list[str]] = {}
    for module, path in FILES.items():
        if module not in HOMES:
            crowd.setdefault(path.parent, []).append(path.name)
    assert {str(p): files for p, files in crowd.items() if len(files) > FULLEST_FOLDER} == {}


def test_a_method_is_named_in_its_own_file_and_the_registry_alone():
    word = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, NAMES))})(?![\w-])")
    found = {
        (module, name)
        for module, path in FILES.items()
        if module not in HOMES
        for name in word.findall(path.read_text())
    }
    assert found == NAMED
