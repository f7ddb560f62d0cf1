"""What is to be measured on a GPU, in nine minutes, by the interpreter that runs this.

    python docs/benchmarks/gpu_all.py [--out FOLDER] [--device cpu --quick]     # make gpu-bench

Every step has a limit, writes its results as they come, and leaves the others alone if it fails.
It needs torch >= 2.11 with CUDA, and what hybrid needs, which is taken from this source tree. A
step that lacks a package or a program is left out, and named. `--device cpu --quick` rehearses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ALL_SECONDS, SHORTEST = 540, 10
"""Seconds of all steps, and of one that is worth its start."""
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
TESTS = (
    "tests/solvers/kernels/test_operations.py",
    "tests/hybrid/rounds/test_host_reads.py",
    "tests/solvers/engine/test_graphs.py",
    "tests/solvers/numerics/test_draws.py",
    "tests/hybrid/data/test_dataset.py",
)
"""All files with tests that need a GPU."""


class Step(NamedTuple):
    """One thing to run."""

    name: str
    seconds: int
    """Its limit."""
    command: list[str]
    missing: str = ""
    """What it would need; empty: it can run."""


def steps(out: Path, device: str, quick: bool) -> list[Step]:
    """List the steps, the most important first, and what they lack here."""
    python, programs = sys.executable, Path(__file__).parent
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    here, short = ["--device", device], ["--quick"] * quick
    size = (
        ["--megabytes", "1", "--turns", "2"] if quick else ["--megabytes", "128", "--turns", "12"]
    )

    def training(part: str, seconds: int, *words: str) -> Step:
        name = "-".join([part, *words[1:]])
        file = ["--out", str(out / f"{name}.jsonl")]
        command = [python, str(programs / "gpu_training.py"), part, *words, *here, *short, *file]
        return Step(name, seconds, [*command, "--seconds", str(seconds - 15)])

    tests = [python, "-m", "pytest", "-m", "gpu", "-q", "--tb=line", *TESTS]
    four = [mpirun or "mpirun", "-n", "4", "--bind-to", "none", python, "-m", "hybrid", "bench"]
    four += ["--model", "resnet20", "--rows", "backprop,ddg", "--set", f"train.device={device}"]
    four += ["--set", "train.precision=bfloat16", "--out", str(out / "ranks")]
    four += ["--turns", "1", "--steps", "2", "--batch-size", "32"] * quick
    kernels = [python, str(programs / "gpu_kernels.py"), *here, *size]
    return [
        Step("doctor", 60, [python, "-m", "hybrid", "doctor"]),
        Step(
            "tests",
            130,
            [*tests, "--collect-only"] if device == "cpu" else tests,
            lacking("pytest", "hypothesis"),
        ),
        training("rates", 150, "--models", "resnet20"),
        training("launches", 60),
        training("bits", 90),
        Step("kernels", 120, [*kernels, "--out", str(out / "kernels.json")]),
        training("rates", 100, "--models", "resnet50"),
        Step(
            "ranks",
            60,
            four,
            "" if mpirun and not lacking("mpi4py") else "mpirun, and mpi4py for the same MPI",
        ),
        Step(
            "bits of two ranks joined by NCCL",
            90,
            [python, str(programs / "gpu_nccl.py")],
            "" if cards() > 1 else "two GPUs, because NCCL joins no two ranks of one",
        ),
    ]


def lacking(*packages: str) -> str:
    """Name those that are not installed."""
    return " and ".join(name for name in packages if find_spec(name) is None)


def cards() -> int:
    """Count the GPUs that torch sees."""
    import torch

    return int(torch.cuda.device_count())


def machine(device: str) -> str:
    """Describe GPU and torch; an exit in one line without them."""
    if lacking("torch"):
        sys.exit(f"gpu-bench: {sys.executable} has no torch: give BIN=, the folder of one that has")
    import torch

    if device == "cpu":
        return f"a rehearsal on the CPU, torch {torch.__version__}"
    if not torch.cuda.is_available():
        sys.exit(
            f"gpu-bench: torch {torch.__version__} sees no GPU: run it where there is one, with a "
            "torch for its CUDA"
        )
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few small steps: a rehearsal")
    options = parser.parse_args()
    print(machine(options.device), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | AS_ROOT | {"PYTHONPATH": path}
    begin, failed = perf_counter(), list[str]()
    for step in steps(options.out.absolute(), options.device, options.quick):
        passed = perf_counter() - begin
        limit = min(step.seconds, ALL_SECONDS - passed)
        if step.missing or limit < SHORTEST:
            why = f"needs {step.missing}" if step.missing else "has no time left"
            print(f"left out: {step.name}, which {why}", flush=True)
            continue
        print(f"{step.name} (at {passed:.0f} s, limit {limit:.0f} s)", flush=True)
        try:
            subprocess.run(step.command, cwd=ROOT, env=environment, check=True, timeout=limit)
        except subprocess.TimeoutExpired:
            failed.append(f"{step.name} (over its limit)")
        except subprocess.CalledProcessError as error:
            failed.append(f"{step.name} (status {error.returncode})")
    if failed:
        sys.exit(f"gpu-bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
