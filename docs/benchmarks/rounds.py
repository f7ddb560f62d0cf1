"""Rounds of replicas on digits: test accuracy after 8 epochs, whatever the length of a round.

    python docs/benchmarks/rounds.py

A multilayer perceptron (64, 32, 32, 10) on scikit-learn's digits, batch 64, so 22 steps an epoch;
two replicas on threads, SGD with Nesterov momentum 0.9, lr 0.1, constant after a warm-up of one
epoch; three seeds. A minute on one core.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from hybrid import OptimizerSettings, Trainer, TrainSettings, data, split
from hybrid.settings.config import ScheduleSettings
from hybrid.solvers import Backprop
from hybrid.solvers.sync import HPSGD, AllReduce, DiLoCo, LocalSGD
from hybrid.solvers.sync.base import Strategy

ROWS: dict[str, Strategy] = {
    "all-reduce": AllReduce(),
    "local-sgd, h = 22": LocalSGD(steps=22),
    "diloco, h = 16": DiLoCo(steps=16),
    "diloco, h = 22": DiLoCo(steps=22),
    "diloco, h = 30": DiLoCo(steps=30),
    "hpsgd, h = L = 4": HPSGD(steps=4, lag=4),
}
SEEDS = range(3)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    hidden = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))


def accuracy(strategy: Strategy, seed: int, sets: Any) -> float:
    made = Trainer(
        split(network(seed), 1),
        Backprop(),
        replicas=2,
        sync=strategy,
        train=TrainSettings(epochs=8, batch_size=64, seed=seed, threads=1),
        optimizer=OptimizerSettings(lr=0.1),
        schedule=ScheduleSettings(name="constant"),
        quiet=True,
    )
    return 100 * float(made.fit(*sets)["test_accuracy"])


def main() -> None:
    sets = data.load("digits")
    found = {name: [accuracy(row, s, sets) for s in SEEDS] for name, row in ROWS.items()}
    print("| strategy | seeds 0, 1, 2 | mean |\n|---|---|---|")
    for name, values in found.items():
        seeds = ", ".join(f"{x:.1f}" for x in values)
        print(f"| `{name}` | {seeds} % | {mean(values):.1f} ± {stdev(values):.1f} % |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
