"""No file of data, settings or tensors is ever code: no source can run what a file holds."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("hybrid", "solvers", *(f"wings/{p.name}/hybrid_{p.name}" for p in ROOT.glob("wings/*")))
SOURCES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "dbm"),
    *("yaml", "runpy", "code", "codeop", "imp", "zipimport", "xmlrpc", "multiprocessing"),
}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
CALLS = {
    *("torch.load", "torch.save", "torch.hub", "torch.jit.load", "torch.package"),
    *("numpy.load", "numpy.save", "numpy.fromfile", "numpy.memmap", "np.load", "np.fromfile"),
    *("os.system", "os.popen", "os.execv", "os.spawnl", "importlib.import_module"),
}
PICKLED = r"_object(_list)?$"
"""The end of the names of torch.distributed's collectives that pickle."""

# their modules are constants, or what an installed package's metadata names
# named.py imports what the command line names; references.py refuses what a file does
IMPORTING = {
    *("hybrid/__init__.py", "hybrid/doctor/checks.py", "hybrid/links/__init__.py"),
    *("hybrid/training/callbacks/services.py", "solvers/__init__.py", "solvers/named.py"),
}


def faults(tree):
    """What a source does that could make a file's content run."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name in CALLS]
            found += [n for n in names[:1] if n.partition(".")[0] in MODULES and not node.level]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and re.search(PICKLED, node.attr):
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in BUILTINS else []
            options = [k.arg for k in node.keywords if ast.unparse(k.value) == "True"]
            found += [f"{name}({option}=True)" for option in options if option in UNSAFE]
    return found


UNSAFE = {"shell", "allow_pickle"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_can_run_what_a_file_holds(path):
    allowed = ["importlib.import_module"] * (str(path.relative_to(ROOT)) in IMPORTING)
    # a user's data set goes to its own worker processes, through no file
    if path.match("hybrid/data/reader.py"):
        allowed += ["multiprocessing.get_context", "multiprocessing.connection.wait"]
    if path.match("hybrid/doctor/checks.py"):  # a pool of threads
        allowed = ["multiprocessing.TimeoutError", *allowed, "multiprocessing.pool.ThreadPool"]
    assert sorted(faults(ast.parse(path.read_text()))) == sorted(allowed)


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from pickle import loads", "import joblib", "from torch import load"),
        *("torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "eval('1')"),
        *(
            "x.load(f, allow_pickle=True)",
            "run('x', shell=True)",
            "os.system('x')",
            "import marshal",
            "dist.all_gather_object(everyone, value, group)",
            "torch.distributed.broadcast_object_list(values)",
        ),
        "def f():\n    from multiprocessing import Pool",
    ],
)
def test_the_search_finds(line):
    assert faults(ast.parse(line)) != []
