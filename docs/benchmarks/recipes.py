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

import subprocess
import sys
from pathlib import Path
from statistics import mean

import measuring

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


KEYS = "test_accuracy train_seconds images_per_second idle_share bytes_sent"


def main() -> None:
    options = measuring.options(
        __doc__, table=TABLES, runs=Path("runs/recipes"), **measuring.GRID | {"seeds": [0, 1, 2]}
    )
    rows: dict[str, dict[str, dict[str, object]]] = {}
    for seed in options.seeds:
        for name, flags in measuring.chosen(TABLES[options.table].items(), options):
            out = options.runs / f"{name}-s{seed}"
            if not (out / "summary.json").exists() and not options.only_collect:
                out.parent.mkdir(parents=True, exist_ok=True)
                train(f"{flags} {FIXED} --seed {seed} --data-dir {options.data_dir} --out {out}")
            if (kept := measuring.of_summary(out, KEYS)) is not None:
                rows.setdefault(name, {})[str(seed)] = kept
    measuring.Raw(__file__, f"-{options.table}").write(rows)
    measuring.show(
        "run | test accuracy | seeds | virtual seconds | idle share",
        (
            (
                name,
                f"{measuring.spread([100 * v['test_accuracy'] for v in row], '.2f')} %",
                len(row),
                f"{mean(v['train_seconds'] for v in row):.1f}",
                f"{mean(mean(v['idle_share']) for v in row):.0%}",
            )
            for name, row in ((name, [*seeds.values()]) for name, seeds in rows.items())
        ),
    )


def train(flags: str) -> None:
    command = [str(Path(sys.executable).with_name("hybrid")), "train", *flags.split()]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
