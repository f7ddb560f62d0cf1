"""Methods by name: imported when asked for, other packages' among them."""

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from answers import refusal

from hybrid import solvers
from hybrid.registries import SAMPLERS
from hybrid.solvers import Backprop, Solver, named, registry
from hybrid.solvers.acting import nearest


class Mine(Backprop):
    """A method of another package."""

    name = "mine"


def others(monkeypatch, *points):
    """Let other packages add methods, as (name, "module:Class")."""
    found = EntryPoints(EntryPoint(f"solver.{name}", place, "hybrid") for name, place in points)
    monkeypatch.setattr(named, "entry_points", lambda: found)


@pytest.mark.parametrize("name", registry.OWN)
def test_every_name_leads_to_the_class_that_has_it(name):
    found = registry.solver_class(name)
    assert issubclass(found, Solver)
    assert found.name == name
    assert getattr(solvers, found.__name__) is found


TABLES = {table.kind: table for table in (registry.SOLVERS, registry.STRATEGIES, SAMPLERS)}


@pytest.mark.parametrize("point", named.APART)
def test_a_method_of_a_package_apart_is_answered_by_how_to_install_it(point, monkeypatch):
    others(monkeypatch)
    kind, name = point.split(".")
    said = refusal(TABLES[kind].__getitem__, name)
    assert said.startswith(f"{kind} {name!r} is of a package of its own: run `pip install ./wings/")
    project = Path(__file__).parents[2] / "wings" / named.APART[point] / "pyproject.toml"
    assert f'"{point}" = ' in project.read_text()
    assert f"/{project.parent.name}`" in said


def test_names_are_read_without_torch():
    program = (
        "import sys, hybrid.solvers.registry as r; print(len(r.OWN), 'torch' in sys.modules); "
        "assert {*r.OWN} <= {*r.names()}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(len(registry.OWN)), "False"]


def test_what_the_package_has_not_is_no_attribute():
    with pytest.raises(AttributeError, match=r"'hybrid.solvers' has no attribute 'Nope'"):
        _ = solvers.Nope


def test_another_package_adds_a_method(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    others(monkeypatch, ("mine", "mine:Mine"))
    assert registry.names() == [*registry.OWN, "mine"]
    assert registry.solver_class("mine") is Mine
    for name, said in (("minee", "did you mean 'mine'"), ("q", "known: backprop, penalty, augm")):
        asked = refusal(registry.solver_class, name)
        assert asked.startswith(f"unknown solver {name!r}; {said}")


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (
            [("x", "no.such.module:Y")],
            "solver 'x' of another package cannot be imported: ModuleNotFoundError: ",
        ),
        (
            [("x", "raises:Y")],
            "cannot be imported: SystemExit: two lines: install that package again, or uninstall",
        ),
        (
            [("x", "hybrid.solvers.splitting.penalty:Penalty")],
            "that is no Solver whose name is 'x'",
        ),
    ],
    ids=str,
)
def test_a_method_that_cannot_be_added_is_refused_in_one_line(monkeypatch, tmp_path, points, said):
    (tmp_path / "raises.py").write_text("raise SystemExit('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    others(monkeypatch, *points)
    why = refusal(registry.solver_class, "x")
    assert said in why
    told = []
    assert [*registry.SOLVERS.usable(told.append)] == [*registry.OWN]
    assert told == [f"{why} (it is left out)"] * len(points)


def test_the_folder_is_no_package_of_its_own_and_a_users_folder_may_have_its_name(tmp_path):
    words = [sys.executable, "-c", "import solvers"]
    root = Path(__file__).parents[2]
    told = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert told.stderr.rstrip().endswith(": import hybrid.solvers")
    (tmp_path / "solvers").mkdir()
    (tmp_path / "solvers" / "__init__.py").write_text("own = 1\n")
    program = "import solvers, torch\nfrom hybrid import Trainer, split\n"
    program += "from hybrid.solvers import DDG\nassert solvers.own > hasattr(solvers, 'DDG')\n"
    program += "Trainer(split(torch.nn.Sequential(torch.nn.Flatten()), blocks=1), solver=DDG())\n"
    assert in_a_script(tmp_path, program) == ""


def in_a_script(folder, program):
    """What a script in a folder says on stderr."""
    (folder / "script.py").write_text(program)
    words = [sys.executable, folder / "script.py"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stderr


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("DDG", ["ddg", "fdg"], "ddg"),
        ("AugmentedLagrangian", ["penalty", "augmented-lagrangian"], "augmented-lagrangian"),
        ("resnett20", ["resnet20", "resnet56"], "resnet20"),
        ("xyz", ["ddg", "fdg"], None),
    ],
)
def test_the_nearest_name_is_the_most_alike_one(word, known, meant):
    assert nearest(word, known) == meant
