"""What local steps are worth: trainings on virtual links, mean and spread over seeds.

    python docs/benchmarks/recipes.py bubbles --data-dir ~/data    ResNet-20, 20,000 images
    python docs/benchmarks/recipes.py ablation --data-dir ~/data   ResNet-8, 10,000 images
    python docs/benchmarks/recipes.py messages --data-dir ~/data   the same, number formats
    python docs/benchmarks/recipes.py sixteen --data-dir ~/data    ResNet-56 at K = 16

Runs that are already in --runs are not repeated; --only-collect makes the table and JSON from
those. Times are of the virtual clock (10 Gb/s, 10 us, one thread a block). Several of these
scripts may work on different --seeds at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

FIXED = (
    "--data cifar10 --set train.threads=1 --set train.evaluate_every=100"
    " --set checkpoint.every=100 --set links.kind=virtual"
)
SERIAL = "--solver backprop --set solver.micro_batches=4"
K2 = "--solver backprop --set solver.micro_batches=8"
SWEEP = "--solver augmented-lagrangian --set correction.micro_batches=4"
BIG = "--model resnet20 --set data.limit=20000"
SMALL = "--model resnet8 --set data.limit=10000 --blocks 4 --epochs 3"
DEEP = "--model resnet56 --set data.limit=8000 --lr 0.25 --epochs 2 --solver backprop"
TABLES = {
    "bubbles": {
        "b6": f"{BIG} --lr 0.25 --blocks 1 --epochs 6 --solver backprop",
        "p4-e3": f"{BIG} --lr 0.25 --blocks 4 --epochs 3 {SERIAL}",
        "p4-e4": f"{BIG} --lr 0.25 --blocks 4 --epochs 4 {SERIAL}",
        "p8-e1": f"{BIG} --lr 0.25 --blocks 8 --epochs 1 {SERIAL}",
        "k2-float32": f"{BIG} --lr 0.25 --blocks 2 --epochs 6 {K2}",
        "k2-bfloat16": f"{BIG} --lr 0.25 --blocks 2 --epochs 6 {K2} --set solver.messages=bfloat16",
    },
    "sixteen": {
        "deep-base": f"{DEEP} --blocks 1",
        "deep-k16": f"{DEEP} --blocks 16 --set solver.micro_batches=8",
    },
    "messages": {
        name: f"{SMALL} --lr 0.25 {SERIAL} {flag}"
        for name, flag in {
            "float32": "",
            "bfloat16": "--set solver.messages=bfloat16",
            "float16": "--set solver.messages=float16",
            "int8": "--set solver.messages=int8",
            "filter2": "--set solver.filter=2",
        }.items()
    },
    "ablation": {
        "serial-lr0.1": f"{SMALL} --lr 0.1 {SERIAL}",
        "serial-lr0.25": f"{SMALL} --lr 0.25 {SERIAL}",
        "serial-lr0.4": f"{SMALL} --lr 0.4 {SERIAL}",
        "serial-lr0.6": f"{SMALL} --lr 0.6 {SERIAL}",
        "serial-5-epochs": f"{SMALL} --lr 0.25 {SERIAL} --epochs 5",
        "window4": f"{SMALL} --lr 0.25 {SWEEP} --window 4",
        "window4-sweeps2": f"{SMALL} --lr 0.25 {SWEEP} --window 4 --sweeps 2"
        " --set solver.local_lr=0.3",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only-collect", action="store_true")
    options = parser.parse_args()
    rows: dict[str, dict[str, dict[str, object]]] = {}
    for seed in options.seeds:
        for name, flags in TABLES[options.table].items():
            out = options.runs / f"{name}-s{seed}"
            summary = out / "summary.json"
            if not summary.exists() and not options.only_collect:
                out.parent.mkdir(parents=True, exist_ok=True)
                train(f"{flags} {FIXED} --seed {seed} --data-dir {options.data_dir} --out {out}")
            if summary.exists():
                keys = "test_accuracy train_seconds images_per_second idle_share bytes_sent"
                found = json.loads(summary.read_text())
                rows.setdefault(name, {})[str(seed)] = {k: found[k] for k in keys.split()}
    file = Path(__file__).with_name(f"recipes-{options.table}.json")
    file.write_text(json.dumps(rows, indent=1) + "\n")
    print("| run | test accuracy | seeds | virtual seconds | idle share |\n|---|---|---|---|---|")
    for name, row in rows.items():
        values = [100 * v["test_accuracy"] for v in row.values()]  # type: ignore[operator]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        seconds = mean(v["train_seconds"] for v in row.values())  # type: ignore[type-var]
        idle = [mean(v["idle_share"]) for v in row.values()]  # type: ignore[call-overload]
        print(
            f"| {name} | {mean(values):.2f}{spread} % | {len(values)} | {seconds:.1f} "
            f"| {mean(idle):.0%} |"
        )


def train(flags: str) -> None:
    command = [str(Path(sys.executable).with_name("hybrid")), "train", *flags.split()]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
