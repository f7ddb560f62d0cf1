"""What can be known of `make gpu-bench` without a GPU."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "docs" / "benchmarks"


def program(name: str) -> dict[str, object]:
    return runpy.run_path(str(PROGRAMS / f"{name}.py"))


def dry_run(*words: str) -> str:
    command = ["make", "--dry-run", "--always-make", "--directory", ROOT, "gpu-bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def test_an_interpreter_that_is_there_is_taken_as_it_is() -> None:
    folder = Path(sys.executable).parent
    said = dry_run(f"BIN={folder}")
    assert f"{folder}/python docs/benchmarks/gpu_all.py" in said
    assert "venv" not in said.replace(str(folder), "")
    assert "pip install" not in said


def test_a_folder_with_python3_alone_will_do(tmp_path: Path) -> None:
    (tmp_path / "python3").touch()
    assert f"{tmp_path}/python3 docs/benchmarks/gpu_all.py" in dry_run(f"BIN={tmp_path}")


def test_without_one_the_environment_is_made() -> None:
    assert "-m venv .venv" in dry_run()


@pytest.mark.parametrize("name", ["gpu_all", "gpu_kernels", "gpu_training"])
def test_without_a_gpu_a_program_says_so_in_one_line(name, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"^gpu.* torch .+ sees no GPU: .+$"):
        program(name)["main"]()


@pytest.mark.parametrize(
    ("missing", "left_out"),
    [
        ((), {}),
        (("pytest",), {"tests": "pytest"}),
        (("mpi4py",), {"four ranks on one card": "mpirun, and mpi4py for the same MPI"}),
    ],
)
def test_what_cannot_run_here_is_left_out_with_what_it_needs(
    missing, left_out, tmp_path, monkeypatch
) -> None:
    made = program("gpu_all")["steps"]
    found = made.__globals__["find_spec"]
    monkeypatch.setitem(
        made.__globals__, "find_spec", lambda name: None if name in missing else found(name)
    )
    steps = made(tmp_path)
    assert [step.name for step in steps] == [
        *("tests", "kernels", "training", "four ranks on one card")
    ]
    assert {step.name: step.missing for step in steps if step.missing} == left_out


def test_without_mpirun_several_ranks_are_left_out(tmp_path, monkeypatch) -> None:
    made = program("gpu_all")["steps"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert made(tmp_path)[-1].missing.startswith("mpirun")
