"""AMPNet on ResNets of stochastic depth: against a flushed pipeline in time, and in accuracy.

    python docs/benchmarks/ampnet.py time --data-dir ~/data
    python docs/benchmarks/ampnet.py accuracy --data-dir ~/data

CIFAR-10, batch 128 in 8 instances (micro-batches) of 16, K = 4 blocks balanced by what a unit costs
and how often it survives, the virtual clock, one thread, 10 Gb/s. Every row trains the same model:
`model.survival` is the network's, and a unit that is left out costs nothing in any row. Time:
ResNet-56, an epoch of --steps mini-batches, all rows in turn, --turns times. Accuracy: ResNet-20 on
the first 20,000 images, --epochs epochs at lr 0.1, 10,000 test images. Rows that the JSON holds are
not repeated; --rows and --seeds choose some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from hybrid import Trainer, data, split
from hybrid.data import Dataset
from hybrid.networks import models
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import LinkSettings, OptimizerSettings, TrainSettings
from hybrid.solvers import DDG, Backprop, Solver
from hybrid_messages import AMPNet

FILE = Path(__file__).with_name("ampnet.json")
K, M = 4, 8

ROWS: Mapping[str, tuple[Solver, float]] = {
    # solver, survival of the last unit
    "whole network: flushed pipeline": (Backprop(micro_batches=M), 1.0),
    "whole network: ampnet": (AMPNet(micro_batches=M), 1.0),
    "survival 0.5: flushed pipeline": (Backprop(micro_batches=M), 0.5),
    "survival 0.5: ddg, never flushed, in one order": (DDG(micro_batches=M), 0.5),
    "survival 0.5: ampnet, 4 keys": (AMPNet(micro_batches=M, max_active_keys=4), 0.5),
    "survival 0.5: ampnet": (AMPNet(micro_batches=M), 0.5),
    "survival 0.5: ampnet, 16 keys": (AMPNet(micro_batches=M, max_active_keys=16), 0.5),
    "survival 0.5: ampnet, a step every 4 instances": (
        AMPNet(micro_batches=M, min_update_frequency=4),
        0.5,
    ),
}
BASES = {
    1.0: "whole network: flushed pipeline",
    0.5: "survival 0.5: flushed pipeline",
}
TRAINED = [
    "whole network: flushed pipeline",
    "survival 0.5: flushed pipeline",
    "survival 0.5: ampnet",
    "survival 0.5: ampnet, a step every 4 instances",
]


def trained(
    row: str, model: str, seed: int, epochs: int, images: Dataset, test: Dataset
) -> dict[str, Any]:
    """The summary of a run, or why there is none."""
    solver, survival = ROWS[row]
    torch.manual_seed(seed)
    network = models.stochastic_depth(models.build(model, 10, 3, 32), survival)
    trainer = Trainer(
        split(network, K),
        solver,
        train=TrainSettings(epochs=epochs, seed=seed, threads=1, evaluate_every=100),
        optimizer=OptimizerSettings(lr=0.1),
        links=LinkSettings(kind="virtual"),
        quiet=True,
    )
    try:
        return trainer.fit(images, test)
    except DivergedError as error:
        return {"failed": str(error)}


def times(options: argparse.Namespace) -> None:
    images, test = data.load("cifar10", options.data_dir, 128 * options.steps)
    for turn in range(options.turns):
        for row in [*(options.rows or ROWS)][:: 1 if turn % 2 else -1]:
            if len(known()["time"].get(row, [])) > turn:
                continue
            found = trained(row, "resnet56", 0, 1, images, test.take(100))
            rows = known()
            kept = {k: found[k] for k in ("images_per_second", "idle_share")}
            rows["time"].setdefault(row, []).append(kept)
            keep(rows)
    print("| ResNet-56 | images/s, median | over the flushed pipeline | idle share of ranks |")
    print("|---|---|---|---|")
    for row, turns in known()["time"].items():
        base = known()["time"].get(BASES[ROWS[row][1]], [])
        rates = [turn["images_per_second"] for turn in turns]
        pairs = zip(rates, base, strict=False)
        ratios = [rate / own["images_per_second"] for rate, own in pairs] or [float("nan")]
        idle = [median(each) for each in zip(*(t["idle_share"] for t in turns), strict=True)]
        print(f"| {row} | {median(rates):.1f} | {median(ratios):.2f} ", end="")
        print(f"({min(ratios):.2f}, {max(ratios):.2f}) | ", end="")
        print(", ".join(f"{100 * share:.0f}" for share in idle), f"% (mean {mean(idle):.0%}) |")


def accuracies(options: argparse.Namespace) -> None:
    images, test = data.load("cifar10", options.data_dir, options.limit)
    for seed in options.seeds:
        for row in options.rows or TRAINED:
            key = f"{options.model}, {len(images):,} images, {options.epochs} epochs: {row}"
            if str(seed) in known()["accuracy"].get(key, {}):
                continue
            found = trained(row, options.model, seed, options.epochs, images, test)
            rows = known()
            kept = {k: found[k] for k in ("failed", "test_accuracy", "train_seconds") if k in found}
            rows["accuracy"].setdefault(key, {})[str(seed)] = kept
            keep(rows)
    print("| run | test accuracy | virtual seconds | seeds |\n|---|---|---|---|")
    for key, by_seed in known()["accuracy"].items():
        there = [each for each in by_seed.values() if "failed" not in each]
        values = [100 * each["test_accuracy"] for each in there]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        told = f"{mean(values):.1f}{spread} %" if values else "diverged"
        seconds = f"{mean(each['train_seconds'] for each in there):.0f}" if there else ""
        print(f"| {key} | {told} | {seconds} | {len(by_seed)} |")


def known() -> dict[str, dict[str, Any]]:
    """The figures there are."""
    empty: dict[str, dict[str, Any]] = {"time": {}, "accuracy": {}}
    return empty | (json.loads(FILE.read_text()) if FILE.exists() else {})


def keep(rows: dict[str, dict[str, Any]]) -> None:
    FILE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["time", "accuracy"])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--limit", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    accuracies(options) if options.what == "accuracy" else times(options)


if __name__ == "__main__":
    main()
