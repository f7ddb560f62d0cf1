"""The rules of the house: imports run downwards, no circle, short files, methods named once."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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

# A room is a package, or a module that stands by itself, and imports from the rooms below it only.
# `hybrid` is the package's face, hybrid/__init__.py; `solvers` is the methods, a file each.
ROOMS = (
    *("hybrid.__main__", "hybrid.cli"),
    *("hybrid.plan", "hybrid.report", "hybrid.bench", "hybrid.doctor"),
    *("hybrid", "hybrid.runs", "hybrid.training"),
    *("hybrid.method", "hybrid.rounds", "hybrid.optimizers"),
    *("hybrid.ranks", "hybrid.folder", "hybrid.samplers"),
    *("hybrid.cuts", "hybrid.links", "hybrid.data", "hybrid.models"),
    *("hybrid.settings", "hybrid.samplers.registry", "hybrid.links.registry"),
    *("hybrid.ranks.grid", "hybrid.errors", "hybrid.orphans", "hybrid.reading"),
    *("solvers", "solvers.registry"),
    *("solvers.splitting", "solvers.local", "solvers.delayed"),
    *("solvers.exact", "solvers.base", "solvers.blocks"),
    *("solvers.windows", "solvers.sync", "solvers.state", "solvers.layers", "solvers.kernels"),
    *("solvers.named", "solvers.acting", "solvers.checks", "solvers.stopwatch"),
    *("solvers.dispatch", "solvers.uncompiled", "solvers.short_name"),
)

LONGEST_FILE, FULLEST_FOLDER = 400, 12

METHODS = {name: short(place).partition(":") for name, place in registry.OWN.items()}
NAMES = {*METHODS, *(attribute for _, _, attribute in METHODS.values())}
HOMES = {module for module, _, _ in METHODS.values()} | {"solvers", "solvers.registry"}

# beside its own file, the registry and the package's face, a method is named by
NAMED = {
    ("hybrid.bench.recipes", "Backprop"),  # the base of every comparison is serial training
    ("solvers.exact.exact_pass", "backprop"),  # which is this pass alone
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


def test_a_folder_is_not_crowded():
    crowd: dict[Path, list[str]] = {}
    for module, path in ALL.items():
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


READS = {"open", "fdopen", "read_text", "read_bytes", "fromfile", "load_file", "safe_open"}
READERS = {
    "hybrid.reading": "the one way",
    "hybrid.data.files.download": "what it has fetched itself, by a checksum",
    "hybrid.data.files.formats": "the user's own images",
    "hybrid.data.files.pickled": "the user's own images",
    "hybrid.bench.measure": "/proc",
    "hybrid.bench.report": "/proc",
    "hybrid.doctor.storage": "/proc",
    "hybrid.folder.origin": "this package's own repository",
    "hybrid.ranks.launcher": "/proc",
    "hybrid.ranks.slurm": "a template of this package",
    "hybrid.ranks.stopping": "/proc",
    "hybrid.report.page": "templates of this package",
    "solvers.kernels.cupy_launcher": "sources of this package",
}
"""Whose files are none of a run folder's, or of a user's settings."""
OTHERWISE = {
    ("hybrid.cli.failure", "run_command"): "writes to nowhere",
    ("hybrid.data.generated", "digits"): "this package's images",
    ("hybrid.errors", "silence"): "writes to nowhere",
    ("hybrid.folder.board", "__init__"): "a new file",
    ("hybrid.folder.files", "write_durably"): "a new file",
    ("hybrid.folder.files", "sync"): "a folder",
    ("hybrid.folder.files", "_copy"): "moves what it has found to be a regular file",
    ("hybrid.folder.lock", "__init__"): "a new file",
    ("hybrid.folder.lock", "_copy"): "a new file, of its own other one",
    ("hybrid.folder.lock", "_touched_at"): "looks for a file's time, and reads nothing",
    ("hybrid.folder.lock", "_without_waiting"): "looks for a file's time, and reads nothing",
    ("hybrid.folder.lock", "_boot"): "/proc",
    ("hybrid.folder.lock", "_started_at"): "/proc",
    ("hybrid.folder.runfolder", "open"): "writes at the end of a file that was just made",
    ("hybrid.training.callbacks.csv_logger", "_add_row"): "writes at the end of a file",
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
    assert found == OTHERWISE.keys(), "read it by hybrid.reading"
