"""Hybrid against serial training on CIFAR-10 at equal epochs of data, mean and spread over seeds.

    python docs/benchmarks/cifar10.py --data-dir ~/data [--blocks 1 2 4 8] [--epochs 3 6]

One block is serial training, which is bitwise the same for any number of blocks. Runs that are
already in --runs are not repeated; --only-collect makes the table and cifar10.json from those.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

FIXED = (
    "--model resnet20 --data cifar10 --batch-size 128 --set data.limit=20000"
    " --set train.threads=1 --set train.evaluate_every=100 --set checkpoint.every=100"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only-collect", action="store_true")
    options = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    for epochs in options.epochs:
        for blocks in options.blocks:
            for seed in options.seeds:
                out = options.runs / f"k{blocks}-e{epochs}-s{seed}"
                if not (out / "summary.json").exists():
                    if options.only_collect:
                        continue
                    train(out, blocks, epochs, seed, options.data_dir)
                row = table.setdefault(f"{blocks} blocks, {epochs} epochs", {})
                row[str(seed)] = json.loads((out / "summary.json").read_text())["test_accuracy"]
    Path(__file__).with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    print("| run | test accuracy, mean | standard deviation | seeds |\n|---|---|---|---|")
    for name, row in table.items():
        values = [100 * v for v in row.values()]
        spread = f"{stdev(values):.2f}" if len(values) > 1 else "-"
        print(f"| {name} | {mean(values):.2f} % | {spread} | {len(values)} |")


def train(out: Path, blocks: int, epochs: int, seed: int, data_dir: str) -> None:
    solver = "--solver backprop" if blocks == 1 else "--solver augmented-lagrangian --window 4"
    command = [Path(sys.executable).with_name("hybrid"), "train", *FIXED.split()]
    command += [*solver.split(), "--blocks", blocks, "--epochs", epochs, "--seed", seed]
    command += ["--data-dir", data_dir, "--out", out]
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
