"""Images/s of ways to train in K blocks, by the virtual clock, over serial training's.

    python docs/benchmarks/virtual_rates.py --data-dir ~/data
    python docs/benchmarks/virtual_rates.py muon --data-dir ~/data      with Muon

Batch 128, one thread, links of 10 Gb/s and 10 us; short trainings, interleaved, medians of turns.
With the accuracies of delays.py this gives times to an accuracy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hybrid import LinkSettings, OptimizerSettings, Trainer, TrainSettings, data, split
from hybrid.networks import models
from hybrid.settings.config import DelaySettings
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


MUON: dict[str, tuple[str, int, Solver]] = {
    "ResNet-20, serial": ("resnet20", 1, Backprop()),
    **{
        f"ResNet-20, {solver.name}, K={K}": ("resnet20", K, solver)
        for K in (2, 4, 8)
        for solver in (Backprop(micro_batches=8), DDG(micro_batches=8))
    },
    "ResNet-56, serial": ("resnet56", 1, Backprop()),
    **{
        f"ResNet-56, {solver.name}, K={K}": ("resnet56", K, solver)
        for K in (8, 16)
        for solver in (Backprop(micro_batches=8), DDG(micro_batches=8))
    },
}
TABLES = {"sgd": ROWS, "muon": MUON}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizer", nargs="?", choices=TABLES, default="sgd")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    images, test = data.load("cifar10", options.data_dir, 128 * STEPS)
    muon, rows = options.optimizer == "muon", TABLES[options.optimizer]
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.turns):
        for name, (model, K, solver) in rows.items():
            torch.manual_seed(0)
            blocks = split(models.build(model, 10, 3, 32), K, balance="measured")
            settings = TrainSettings(epochs=1, threads=1, report_every=STEPS)
            links = LinkSettings(kind="virtual")
            more: dict[str, Any] = {}
            if muon:
                more["optimizer"] = OptimizerSettings(name="muon")
            if muon and isinstance(solver, DDG):
                more["delay"] = DelaySettings(mend="extrapolate")
            made = Trainer(blocks, solver, train=settings, links=links, quiet=True, **more)
            rates[name].append(made.fit(images, test.take(128))["images_per_second"])
    print("| | images/s | over serial, median (least, most) |\n|---|---|---|")
    for name, found in rates.items():
        base = rates[f"{name.partition(',')[0]}, serial"]
        share = [a / b for a, b in zip(found, base, strict=True)]
        spread = f"({min(share):.2f}, {max(share):.2f})"
        print(f"| {name} | {median(found):.0f} | {median(share):.2f} {spread} |")
    file = Path(__file__).with_name("virtual_rates_muon.json" if muon else "virtual_rates.json")
    file.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
