"""The rules of the house: imports run downwards, no circle, short files, methods named once."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from hybrid.registries import LINKS, SAMPLERS
from hybrid.solvers import registry

ROOT = Path(__file__).parents[1]
LINKED = {ROOT / "hybrid" / "solvers"}


def modules(package):
    """The modules of a package and their files."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted(package.rglob("*.py"))
        if not {*path.parents} & LINKED
    }


def short(name):
    """The name of a module by its file: hybrid.solvers is a link to the folder solvers."""
    return re.sub(r"^hybrid\.solvers\b", "solvers", name)


FILES = modules(ROOT / "hybrid") | modules(ROOT / "solvers")
WINGS = {
    project.parent / name: modules(project.parent / name)
    for project in sorted(ROOT.glob("wings/*/pyproject.toml"))
    for name in [f"hybrid_{project.parent.name}"]
}
"""Packages that import those above, and that none of those knows of."""
ALL = FILES | {module: path for own in WINGS.values() for module, path in own.items()}

# Each row is a floor, and what a room imports lies on a floor below. A room is a folder; the files
# that lie directly in hybrid/ and in solvers/ are a room each, but for the two packages' faces,
# their __init__.py, which give the names of the rooms.
FLOORS = (
    ("hybrid.cli",),
    ("hybrid.__init__", "hybrid.bench"),
    ("hybrid.training",),
    ("hybrid.proof",),
    ("hybrid.method", "hybrid.report", "hybrid.doctor"),
    ("hybrid.rounds", "hybrid.folder", "hybrid.ranks"),
    ("hybrid.links",),
    ("hybrid.settings", "hybrid.data", "hybrid.networks"),
    ("hybrid.*",),
    ("solvers.__init__",),
    ("solvers.splitting", "solvers.delayed", "solvers.local", "solvers.sync", "solvers.optimizers"),
    ("solvers.checks",),
    ("solvers.exact",),
    ("solvers.engine",),
    ("solvers.local_work",),
    ("solvers.*",),
    ("solvers.codecs",),
    ("solvers.numerics",),
    ("solvers.layers",),
    ("solvers.kernels",),
)

LONGEST_FILE, FULLEST_FOLDER = 400, 12
CORE = 37_480
"""Lines of hybrid/ and solvers/: a change that needs more raises it in its commit, and says why."""
CORE_FILES, TESTS, BENCHMARKS = 251, 38_100, 9_470
"""Files of the core, and lines of tests and of docs/benchmarks/*.py; raised likewise."""
ROOMS = {
    "hybrid": 780,
    "hybrid/bench": 2_510,
    "hybrid/cli": 1_000,
    "hybrid/data": 2_270,
    "hybrid/doctor": 280,
    "hybrid/folder": 1_450,
    "hybrid/links": 2_450,
    "hybrid/method": 2_540,
    "hybrid/networks": 4_090,
    "hybrid/proof": 1_090,
    "hybrid/ranks": 1_320,
    "hybrid/report": 1_000,
    "hybrid/rounds": 1_210,
    "hybrid/settings": 1_490,
    "hybrid/training": 3_240,
    "solvers": 2_800,
    "solvers/checks": 460,
    "solvers/codecs": 280,
    "solvers/delayed": 350,
    "solvers/engine": 1_350,
    "solvers/exact": 200,
    "solvers/kernels": 360,
    "solvers/layers": 620,
    "solvers/local": 380,
    "solvers/local_work": 550,
    "solvers/numerics": 1_250,
    "solvers/optimizers": 330,
    "solvers/splitting": 840,
    "solvers/sync": 1_090,
}
"""Lines of each room, as `.ci/house.py` counts them."""

METHODS = {name: short(place).partition(":") for name, place in registry.OWN.items()}
NAMES = {*METHODS, *(attribute for _, _, attribute in METHODS.values())}
HOMES = {module for module, _, _ in METHODS.values()} | {"solvers", "solvers.registry"}

# beside its own file, the registry and the package's face, a method is named by
NAMED = {
    ("hybrid.bench.recipes", "Backprop"),  # the base of every comparison is serial training
}


@cache
def imports(module):
    """The modules of this project that a module imports, within functions and for types, too."""
    found = set()
    for node in ast.walk(ast.parse(ALL[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {short(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            for alias in node.names:
                inner = short(f"{node.module}.{alias.name}")
                found.add(inner if inner in ALL else short(str(node.module)))
    return frozenset(found & ALL.keys())


def room(module):
    """The room that a module is in."""
    package, *inner = module.split(".")
    if not inner or inner == ["__main__"]:
        return f"{package}.cli" if inner else f"{package}.__init__"
    in_folder = len(inner) > 1 or FILES[module].name == "__init__.py"
    return f"{package}.{inner[0]}" if in_folder else f"{package}.*"


def test_every_room_has_a_floor():
    assert {room(module) for module in FILES} == {name for floor in FLOORS for name in floor}


def test_imports_run_downwards():
    floors = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    upwards = {
        (module, other)
        for module in FILES
        for other in imports(module)
        if room(module) != room(other) and floors[room(other)] <= floors[room(module)]
    }
    assert upwards == set()


def test_no_import_goes_in_a_circle():
    TopologicalSorter({module: imports(module) for module in ALL}).prepare()  # else CycleError


def test_nothing_knows_of_a_wing():
    for own in WINGS.values():
        assert own
        others = ALL.keys() - own.keys()
        assert {(m, other) for m in others for other in imports(m) & own.keys()} == set()
    names = re.compile(rf"\b({'|'.join([folder.name for folder in WINGS])})\b")
    commands = re.compile(rf"`?hybrid ({'|'.join(folder.parent.name for folder in WINGS)})\b")
    texts = {module: path.read_text() for module, path in FILES.items()}
    assert [m for m, text in texts.items() if names.search(text) or commands.search(text)] == []


def test_a_file_is_short():
    lengths = {module: len(path.read_text().splitlines()) for module, path in ALL.items()}
    assert {m: length for m, length in lengths.items() if length > LONGEST_FILE} == {}


def lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_core_holds_its_size():
    assert lines(FILES.values()) <= CORE


def test_rooms_tests_and_benchmarks_hold_their_sizes():
    rooms: dict[str, list[Path]] = {}
    for path in FILES.values():
        rooms.setdefault("/".join(path.relative_to(ROOT).parts[:-1][:2]), []).append(path)
    sizes = {room: lines(paths) for room, paths in rooms.items()}
    limits = {**ROOMS, "core, files": CORE_FILES, "tests": TESTS, "docs/benchmarks": BENCHMARKS}
    sizes["core, files"] = len(FILES)
    sizes["tests"] = lines([*ROOT.glob("tests/**/*.py"), *ROOT.glob("wings/*/tests/**/*.py")])
    sizes["docs/benchmarks"] = lines(ROOT.glob("docs/benchmarks/*.py"))
    over = {name: size for name, size in sizes.items() if size > limits.get(name, 0)}
    assert over == {}, "raise the number in the same commit, and say why"


def test_a_folder_is_not_crowded():
    tables = (registry.SOLVERS, registry.STRATEGIES, LINKS, SAMPLERS)
    named = {short(place.partition(":")[0]) for table in tables for place in table.places.values()}
    crowd: dict[Path, list[str]] = {}
    for module, path in ALL.items():
        if module not in named | HOMES:
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


READS = {"open", "fdopen", "read_text", "read_bytes", "fromfile", "load_file", "safe_open"}
READERS = {
    "hybrid.files": "the one way",
    "hybrid.data.sources": "the user's own images",
    "hybrid.bench.table": "/proc",
    "hybrid.ranks.launcher": "/proc",
    "hybrid.ranks.slurm": "a template of this package",
    "hybrid.ranks.stopping": "/proc",
    "hybrid.ranks.machines": "/proc and /sys",
    "solvers.kernels.launcher": "sources of this package",
}
"""Whose files are none of a run folder's, or of a user's settings."""
OTHERWISE = {
    ("hybrid.cli.failure", "run_command"): "writes to nowhere",
    ("hybrid.errors", "silence"): "writes to nowhere",
    ("hybrid.folder.board", "__init__"): "a new file",
    ("hybrid.folder.lock", "_locked_file"): "a regular file of its own, to write",
    ("hybrid.folder.runfolder", "commit"): "this package's own repository",
    ("hybrid.folder.runfolder", "open"): "writes at the end of a file that was just made",
    ("hybrid.weights", "_opened"): "a regular file of the user's weights, read in parts",
}
"""Functions that open a file by other means, and why."""


def opening(module):
    """The functions of a module that call what opens a file."""
    for function in ast.walk(ast.parse(ALL[module].read_text())):
        if isinstance(function, ast.FunctionDef):
            calls = [x.func for x in ast.walk(function) if isinstance(x, ast.Call)]
            named = {x.id for x in calls if isinstance(x, ast.Name)}
            # a run folder's own method is called so, too
            named |= {x.attr for x in calls if isinstance(x, ast.Attribute) and not is_folder(x)}
            if named & READS:
                yield module, function.name


def is_folder(method):
    return ast.unparse(method.value) in ("self.folder", "self._folder")


def test_what_others_may_have_put_somewhere_is_read_in_one_way():
    """Else a pipe hangs a command, a hole takes the memory, and a link shows another's file."""
    found = {one for module in ALL if module not in READERS for one in opening(module)}
    assert found == OTHERWISE.keys(), "read it by hybrid.files"
