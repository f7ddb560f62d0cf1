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
