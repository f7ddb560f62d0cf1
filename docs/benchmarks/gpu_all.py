"""All that is to be measured on a GPU, by the interpreter that runs this; `make gpu-bench`.

    python docs/benchmarks/gpu_all.py [--out FOLDER]

Needs torch >= 2.6 with CUDA and what hybrid needs, which is taken from this source tree. What can
be done without is left out, and said to be: tests without pytest and hypothesis, the fused kernels
without CuPy, several ranks on one card without mpirun and mpi4py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Step(NamedTuple):
    """One thing to run."""

    name: str
    command: list[str]
    missing: str = ""
    """What it would need; empty: it can run."""
    is_check: bool = False
    """Whether its failure ends all: what is measured by code that is wrong is worth nothing."""


def steps(out: Path) -> list[Step]:
    """What there is to do, and what of it cannot be done here."""
    python, programs = sys.executable, Path(__file__).parent
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    four = [mpirun or "mpirun", "-n", "4", python, "-m", "hybrid", "bench", "--model", "resnet20"]
    return [
        Step("tests", [python, "-m", "pytest", "-m", "gpu"], lacking("pytest", "hypothesis"), True),
        Step(
            "bits of two ranks joined by NCCL",
            [python, str(programs / "gpu_nccl.py")],
            "" if cards() > 1 else "two GPUs, because NCCL joins no two ranks of one",
            True,
        ),
        Step(
            "kernels",
            [python, str(programs / "gpu_kernels.py"), "--out", str(out / "gpu_kernels.json")],
        ),
        Step(
            "training",
            [python, str(programs / "gpu_training.py"), "--out", str(out / "gpu_training.json")],
        ),
        Step(
            "four ranks on one card",
            [*four, "--rows", "backprop,window", "--out", str(out / "gpu_ranks")],
            "" if mpirun and not lacking("mpi4py") else "mpirun, and mpi4py for the same MPI",
        ),
    ]


def lacking(*packages: str) -> str:
    """Those that are not installed."""
    return " and ".join(name for name in packages if find_spec(name) is None)


def cards() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return int(torch.cuda.device_count())


def card() -> str:
    """What torch calls the GPU; an exit in one line without one."""
    if lacking("torch"):
        sys.exit(f"gpu-bench: {sys.executable} has no torch: give BIN=, the folder of one that has")
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"gpu-bench: torch {torch.__version__} sees no GPU: run it where there is one, with a "
            "torch for its CUDA"
        )
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    print(card(), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | AS_ROOT | {"PYTHONPATH": path}
    failed = []
    for step in steps(options.out.absolute()):
        if step.missing:
            print(f"left out: {step.name}, which needs {step.missing}", flush=True)
            continue
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        if subprocess.run(step.command, cwd=ROOT, env=environment, check=False).returncode:
            if step.is_check:
                sys.exit(f"gpu-bench: a check failed: {step.name}; nothing is measured")
            failed.append(step.name)
    if failed:
        sys.exit(f"gpu-bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
