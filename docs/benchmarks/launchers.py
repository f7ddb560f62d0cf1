"""Two real ranks under mpirun and under torchrun, and of an earlier version beside them, in turns.

    python docs/benchmarks/launchers.py [--before CHECKOUT] [--models resnet20,resnet56] [--turns 3]

Each row trains one epoch of synthetic images from the start, and tests few; the rate is that of its
summary.json, without start, evaluation and checkpoints. --before names a checkout of an earlier
version, which trains by both, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from hybrid import data

HERE = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ROWS = {
    "all-reduce, 1 x 2": "--blocks 1 --replicas 2 --solver backprop",
    "1F1B, m=8": "--blocks 2 --solver backprop --set solver.micro_batches=8",
    "ddg, m=8": "--blocks 2 --solver ddg --set solver.micro_batches=8",
}
IMAGES = 1280
MPIRUN = [str(BIN / "mpirun"), "-n", "2", "--bind-to", "none", sys.executable]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]


def images() -> tuple[data.Dataset, data.Dataset]:
    """The first of the synthetic images."""
    train, test = data.load("synthetic")

    def first(of: data.Dataset, n: int) -> data.Dataset:
        return data.Dataset(of.images[:n], of.labels[:n], of.classes, of.mean, of.std)

    return first(train, IMAGES), first(test, 256)


def rate(start: list[str], checkout: Path, model: str, row: str) -> float:
    """Images a second."""
    with TemporaryDirectory() as folder:
        words = f"-m hybrid train --model {model} --data launchers:images --epochs 1 {row}".split()
        words += ["--set", "train.threads=1", "--set", "checkpoint.minutes=0"]
        words += ["--out", f"{folder}/run"]
        place = os.environ | {"PYTHONPATH": f"{checkout}:{Path(__file__).parent}"}
        subprocess.run([*start, *words], env=place, cwd=folder, check=True, capture_output=True)
        found = json.loads(Path(folder, "run/summary.json").read_text())
        return float(found["images_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--models", default="resnet20,resnet56")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    ways = {"mpirun": (MPIRUN, HERE), "torchrun": (TORCHRUN, HERE)}
    if options.before is not None:
        before = options.before.resolve()
        ways |= {"mpirun, before": (MPIRUN, before), "torchrun, before": (TORCHRUN, before)}
    found: dict[str, dict[str, list[float]]] = {}
    for model in options.models.split(","):
        for _ in range(options.turns):
            for row, words in ROWS.items():
                rates = found.setdefault(f"{model}, {row}", {way: [] for way in ways})
                for way, (start, checkout) in ways.items():
                    rates[way].append(rate(start, checkout, model, words))
                Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("| | " + " | ".join(ways) + " |\n|---" + "|---" * len(ways) + "|")
    for name, rates in found.items():
        shown = (f"{median(each):.0f} ({min(each):.0f}-{max(each):.0f})" for each in rates.values())
        print(f"| {name} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
