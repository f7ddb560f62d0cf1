"""The decoupled relatives on CIFAR-10: test accuracy, a row a setting.

    python docs/benchmarks/relatives.py --data-dir ~/data [--rows fdg,petra] [--seeds 0 1 2]
        [--only-collect]

K blocks are threads of one process, the bits are those of K MPI ranks. Runs that are already in
--runs are not repeated; --only-collect puts those into relatives.json and prints its table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

FIXED = (
    "--data cifar10 --epochs 3 --set data.limit=20000 --set train.threads=1"
    " --set train.evaluate_every=100 --set checkpoint.every=100 --set checkpoint.minutes=0"
)
LARGE, SMALL = "--batch-size 128", "--batch-size 32 --set optimizer.lr=0.05"
TINY = "--batch-size 16 --set optimizer.lr=0.025"
WHOLE = "--set solver.micro_batches=1"
"""Delays of whole mini-batches."""
SERIAL = "--model resnet20 --solver backprop --blocks 2"
DDG, FR, FDG, LOCAL = (
    f"--model resnet20 --blocks 4 --solver {name}"
    for name in (f"ddg {WHOLE}", f"features-replay {WHOLE}", f"fdg {WHOLE}", "local-updates")
)
CORRECTED = "--window 25 --set rounds.correct_every=2"
ROWS = {
    "serial, batch 128": f"{SERIAL} {LARGE}",
    "ddg, K = 4, batch 128": f"{DDG} {LARGE}",
    "ddg, K = 4, batch 128, lr 0.05": f"{DDG} {LARGE} --set optimizer.lr=0.05",
    "features-replay, K = 4, batch 128": f"{FR} {LARGE}",
    "fdg, K = 4, batch 128": f"{FDG} {LARGE}",
    "fdg, K = 4, batch 128, momentum 0.5": f"{FDG} {LARGE} --set optimizer.momentum=0.5",
    "fdg, K = 4, batch 128, AdamW, lr 0.004": (
        f"{FDG} {LARGE} --set optimizer.name=adamw --set optimizer.lr=0.004"
    ),
    "fdg, K = 4, batch 128, every 2nd window of 26 serial": (
        f"{FDG} {LARGE} --window 26 --set rounds.correct_every=2"
    ),
    "fdg, K = 2, batch 128": f"--model resnet20 --blocks 2 --solver fdg {WHOLE} {LARGE}",
    "local-updates, greedy, K = 4, batch 128": f"{LOCAL} {LARGE}",
    "serial, batch 32": f"{SERIAL} {SMALL}",
    "ddg, K = 4, batch 32": f"{DDG} {SMALL}",
    "ddg, K = 4, batch 32, every 2nd window of 25 serial": f"{DDG} {SMALL} {CORRECTED}",
    "ddg, K = 4, batch 16": f"{DDG} {TINY}",
    "features-replay, K = 4, batch 32": f"{FR} {SMALL}",
    "fdg, K = 4, batch 32": f"{FDG} {SMALL}",
    "fdg, K = 4, batch 32, every 2nd window of 25 serial": f"{FDG} {SMALL} {CORRECTED}",
    "fdg, K = 4, batch 32, b = 0.7": f"{FDG} {SMALL} --set solver.gradient_shrinking=0.7",
    "fdg, K = 2, batch 32": f"--model resnet20 --blocks 2 --solver fdg {WHOLE} {SMALL}",
    "local-updates, greedy, K = 4, batch 32": f"{LOCAL} {SMALL}",
    "local-updates, greedy, K = 4, batch 32, every 2nd window of 25 serial": (
        f"{LOCAL} {SMALL} {CORRECTED}"
    ),
    "local-updates, overlapping, MLP heads, K = 4, batch 32": (
        f"{LOCAL} {SMALL} --set solver.style=overlapping --set solver.head=mlp:128"
    ),
    "augmented-lagrangian, window 4, K = 4, batch 32": (
        f"--model resnet20 --blocks 4 --solver augmented-lagrangian --window 4 {SMALL}"
    ),
    "serial, RevNet-20, batch 32": f"--model revnet20 --solver backprop --blocks 2 {SMALL}",
    "petra, RevNet-20, K = 4, batch 32": (
        f"--model revnet20 --solver petra --blocks 4 {WHOLE} {SMALL}"
    ),
    "serial, batch 32, 6 epochs": f"{SERIAL} {SMALL} --epochs 6",
    "ddg, K = 4, batch 32, 6 epochs": f"{DDG} {SMALL} --epochs 6",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    parser.add_argument("--runs", type=Path, default=Path("runs/relatives"))
    parser.add_argument("--rows", default="", help="only rows with one of these words")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only-collect", action="store_true")
    options = parser.parse_args()
    words = [word for word in options.rows.split(",") if word]
    path = Path(__file__).with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    table: dict[str, dict[str, float]] = {
        name: kept[name]["test_accuracy"] if name in kept else {} for name in ROWS
    }
    for name, flags in ROWS.items():
        for seed in options.seeds:
            out = options.runs / f"{folder_name(name)}-s{seed}"
            wanted = not words or any(word in name for word in words)
            if wanted and not options.only_collect and not (out / "summary.json").exists():
                train(flags, out, seed, options.data_dir)
            if (out / "summary.json").exists():
                found = json.loads((out / "summary.json").read_text())
                table[name][str(seed)] = found["test_accuracy"]
    body = {
        name: {"flags": f"{FIXED} {ROWS[name]}", "test_accuracy": row}
        for name, row in table.items()
        if row
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    print("| row | test accuracy, mean | standard deviation | seeds |\n|---|---|---|---|")
    for name in body:
        values = [100 * v for v in table[name].values()]
        spread = f"{stdev(values):.2f}" if len(values) > 1 else "-"
        print(f"| {name} | {mean(values):.2f} % | {spread} | {len(values)} |")


def folder_name(name: str) -> str:
    """A row's name without what file systems dislike."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def train(flags: str, out: Path, seed: int, data_dir: str | None) -> None:
    """Leaves a summary in `out`."""
    command = [sys.executable, "-m", "hybrid", "train", *FIXED.split(), *flags.split()]
    command += ["--seed", seed, "--out", out]
    command += ["--data-dir", data_dir] if data_dir else []
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
