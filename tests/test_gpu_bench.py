"""What can be known of `make gpu-bench` without a GPU."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "docs" / "benchmarks"


def program(name):
    return runpy.run_path(str(PROGRAMS / f"{name}.py"))


def test_an_interpreter_that_is_there_is_taken_as_it_is_and_else_one_is_made(tmp_path):
    (tmp_path / "python3").touch()
    for words, expected in (
        ((f"BIN={tmp_path}",), f"{tmp_path}/python3 docs/benchmarks/gpu_all.py"),
        ((), "-m venv .venv"),
    ):
        command = ["make", "--dry-run", "--always-make", "--directory", ROOT, "gpu-bench", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        assert expected in done.stdout
        assert ("pip install" in done.stdout) == (not words)


@pytest.mark.parametrize("name", ["gpu_all", "gpu_kernels", "gpu_training"])
def test_without_a_gpu_a_program_says_so_in_one_line(name, monkeypatch):
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
):
    made = program("gpu_all")["steps"]
    found = made.__globals__["find_spec"]
    monkeypatch.setitem(
        made.__globals__, "find_spec", lambda name: None if name in missing else found(name)
    )
    monkeypatch.setitem(made.__globals__, "cards", lambda: 2)
    steps = made(tmp_path)
    assert [step.name for step in steps] == [
        *("tests", "bits of two ranks joined by NCCL"),
        *("kernels", "training", "four ranks on one card"),
    ]
    assert {step.name: step.missing for step in steps if step.missing} == left_out
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(made.__globals__, "cards", lambda: 1)
    _, joined, *_, last = made(tmp_path)
    assert last.missing.startswith("mpirun")
    assert joined.missing.startswith("two GPUs")
