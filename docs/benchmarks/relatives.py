"""The decoupled relatives on CIFAR-10 at equal epochs of data: test accuracy, a row a setting.

    python docs/benchmarks/relatives.py --data-dir ~/data [--rows fdg,petra] [--seeds 0 1 2]
        [--epochs 3] [--only-collect]

K blocks are threads of one process, the bits are those of K MPI ranks. Runs that are already in
--runs are not repeated; --only-collect makes the table and relatives.json from those.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

FIXED = (
    "--data cifar10 --batch-size 128 --set data.limit=20000 --set train.threads=1"
    " --set train.evaluate_every=100 --set checkpoint.every=100 --set checkpoint.minutes=0"
)
RESNET, REVNET = "--model resnet20", "--model revnet20"
ROWS = {
    "serial": f"{RESNET} --solver backprop --blocks 2",
    "ddg, K = 4": f"{RESNET} --solver ddg --blocks 4",
    "features-replay, K = 4": f"{RESNET} --solver features-replay --blocks 4",
    "fdg, K = 4": f"{RESNET} --solver fdg --blocks 4",
    "fdg, K = 4, momentum 0.5": f"{RESNET} --solver fdg --blocks 4 --set optimiser.momentum=0.5",
    "fdg, K = 4, corrected every 2nd round": (
        f"{RESNET} --solver fdg --blocks 4 --window 26 --correct-every 2"
    ),
    "fdg, K = 2": f"{RESNET} --solver fdg --blocks 2",
    "local-updates, greedy, K = 4": f"{RESNET} --solver local-updates --blocks 4",
    "local-updates, greedy, K = 4, corrected every 2nd round": (
        f"{RESNET} --solver local-updates --blocks 4 --window 26 --correct-every 2"
    ),
    "serial, RevNet-20": f"{REVNET} --solver backprop --blocks 2",
    "petra, RevNet-20, K = 4": f"{REVNET} --solver petra --blocks 4",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    parser.add_argument("--runs", type=Path, default=Path("runs/relatives"))
    parser.add_argument("--rows", default="", help="only rows with one of these words")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only-collect", action="store_true")
    options = parser.parse_args()
    words = [word for word in options.rows.split(",") if word]
    table: dict[str, dict[str, float]] = {}
    for number, (name, flags) in enumerate(ROWS.items()):
        for seed in options.seeds:
            out = options.runs / f"{number}-e{options.epochs}-s{seed}"
            wanted = not words or any(word in name for word in words)
            if wanted and not options.only_collect and not (out / "summary.json").exists():
                train(flags, out, options.epochs, seed, options.data_dir)
            if (out / "summary.json").exists():
                found = json.loads((out / "summary.json").read_text())
                table.setdefault(name, {})[str(seed)] = found["test_accuracy"]
    body = {"epochs": options.epochs, "rows": table}
    Path(__file__).with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    print("| row | test accuracy, mean | standard deviation | seeds |\n|---|---|---|---|")
    for name, row in table.items():
        values = [100 * v for v in row.values()]
        spread = f"{stdev(values):.2f}" if len(values) > 1 else "-"
        print(f"| {name} | {mean(values):.2f} % | {spread} | {len(values)} |")


def train(flags: str, out: Path, epochs: int, seed: int, data_dir: str) -> None:
    command = [sys.executable, "-m", "hybrid", "train", *FIXED.split(), *flags.split()]
    command += ["--epochs", epochs, "--seed", seed, "--data-dir", data_dir, "--out", out]
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
