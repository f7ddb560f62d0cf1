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
    monkeypatch.setattr(sys, "argv", [name, *["rates"] * (name == "gpu_training")])
    with pytest.raises(SystemExit, match=r"^gpu.* torch .+ sees no GPU: .+$"):
        program(name)["main"]()


def test_every_file_with_tests_for_a_gpu_is_run_there():
    files = [str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py")]
    marked = {file for file in files if "mark.gpu" in (ROOT / file).read_text()}
    assert {*program("gpu_all")["TESTS"]} == marked - {"tests/test_gpu_bench.py"}


def test_a_step_that_is_slow_or_fails_leaves_the_others_alone(monkeypatch, tmp_path, capsys):
    main = program("gpu_all")["main"]
    step, python = main.__globals__["Step"], sys.executable
    made = [
        step("slow", 0, [python, "-c", "import time; time.sleep(60)"]),
        step("failing", 60, [python, "-c", "raise SystemExit(3)"]),
        step("lacking", 60, [], "a card"),
        step("good", 60, [python, "-c", f"open({str(tmp_path / 'made')!r}, 'w')"]),
    ]
    monkeypatch.setitem(main.__globals__, "steps", lambda *arguments: made)
    monkeypatch.setitem(main.__globals__, "SHORTEST", 0)
    monkeypatch.setattr(sys, "argv", ["gpu_all", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"failed: slow \(over its limit\), failing \(status 3\)$"):
        main()
    assert (tmp_path / "made").exists()
    assert "left out: lacking, which needs a card" in capsys.readouterr().out
