"""Images/s of ways to train in K blocks, by the virtual clock, over serial training's.

    python docs/benchmarks/virtual_rates.py --data-dir ~/data

Batch 128, one thread, links of 10 Gb/s and 10 us; short trainings, interleaved, medians of turns.
With the accuracies of delays.py this gives times to an accuracy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch

from hybrid import LinkSettings, Trainer, TrainSettings, data, split
from hybrid.networks import models
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, Solver

STEPS = 24
ROWS: dict[str, tuple[str, int, Solver]] = {
    "ResNet-20, serial": ("resnet20", 1, Backprop()),
    "ResNet-20, flushed, K=2, m=8": ("resnet20", 2, Backprop(micro_batches=8)),
    "ResNet-20, ddg, K=2, m=8": ("resnet20", 2, DDG(micro_batches=8)),
    "ResNet-20, flushed, K=4, m=8": ("resnet20", 4, Backprop(micro_batches=8)),
    "ResNet-20, augmented-lagrangian, gaps filled, K=4": ("resnet20", 4, AugmentedLagrangian()),
    "ResNet-20, ddg, K=4, m=4": ("resnet20", 4, DDG(micro_batches=4)),
    "ResNet-20, ddg, K=4, m=8": ("resnet20", 4, DDG(micro_batches=8)),
    "ResNet-20, ddg, K=8, m=8": ("resnet20", 8, DDG(micro_batches=8)),
    "ResNet-56, serial": ("resnet56", 1, Backprop()),
    "ResNet-56, flushed, K=8, m=8": ("resnet56", 8, Backprop(micro_batches=8)),
    "ResNet-56, ddg, K=8, m=8": ("resnet56", 8, DDG(micro_batches=8)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    images, test = data.load("cifar10", options.data_dir, 128 * STEPS)
    rates: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(options.turns):
        for name, (model, K, solver) in ROWS.items():
            torch.manual_seed(0)
            blocks = split(models.build(model, 10, 3, 32), K, balance="measured")
            settings = TrainSettings(epochs=1, threads=1, report_every=STEPS)
            links = LinkSettings(kind="virtual")
            made = Trainer(blocks, solver, train=settings, links=links, quiet=True)
            rates[name].append(made.fit(images, test.take(128))["images_per_second"])
    print("| | images/s | over serial, median (least, most) |\n|---|---|---|")
    for name, found in rates.items():
        base = rates[f"{name.partition(',')[0]}, serial"]
        share = [a / b for a, b in zip(found, base, strict=True)]
        spread = f"({min(share):.2f}, {max(share):.2f})"
        print(f"| {name} | {median(found):.0f} | {median(share):.2f} {spread} |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
