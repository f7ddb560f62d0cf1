"""What choosing samples is worth: test accuracy after every epoch's worth of passes.

    python docs/benchmarks/samplers.py --data-dir ~/data [--model resnet8] [--rows uniform]
        [--seeds 0 1 2] [--noise 0 0.2]

CIFAR-10's first 20,000 images, one block, one thread, batch 128, lr 0.1, six epochs of 156
mini-batches; the default schedule. With --noise so many of the labels are replaced by another
one, drawn uniformly; test labels are right. Rows that the JSON holds are not repeated.

An epoch is 156 passes, whichever samples they are of. The table says how many passes a sampler
needs to reach what uniform samples give after all six, by a straight line between epochs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch

from hybrid import Callback, Trainer, data, split
from hybrid.data import Dataset
from hybrid.data.samplers import AutoAssist, Sampler, SelectiveBackprop, Uniform
from hybrid.data.sampling import uniform
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import Backprop

FILE = Path(__file__).with_suffix(".json")
EPOCHS = 6
ROWS: dict[str, Sampler] = {
    "uniform": Uniform(),
    "auto-assist": AutoAssist(),
    "selective-backprop": SelectiveBackprop(),
    "selective-backprop, beta 2": SelectiveBackprop(beta=2.0),
}


class Curve(Callback):
    """Test accuracy after every epoch, in per cent."""

    def __init__(self) -> None:
        self.points: list[float] = []

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        self.points.append(100 * float(results["test_accuracy"] or 0.0))


def noisy(images: Dataset, share: float) -> Dataset:
    """With so many labels replaced, each by another one."""
    ids = torch.arange(len(images))
    wrong = uniform(1, 0, ids, 1) < share
    shift = 1 + (uniform(1, 0, ids, 2) * (images.classes - 1)).long()
    labels = torch.where(wrong, (images.labels + shift) % images.classes, images.labels)
    return replace(images, labels=labels)


def curve(sampler: Sampler, images: Dataset, test: Dataset, seed: int, model: str) -> list[float]:
    torch.manual_seed(seed)
    seen = Curve()
    Trainer(
        split(models.build(model, 10, 3, 32), 1),
        Backprop(),
        sampler=sampler,
        train=TrainSettings(epochs=EPOCHS, seed=seed, threads=1),
        optimizer=OptimizerSettings(lr=0.1),
        callbacks=[seen],
        quiet=True,
    ).fit(images, test)
    return seen.points


def needed(points: list[float], target: float) -> float:
    """Epochs until the target, between two by a straight line; infinite if it is not reached."""
    before = 0.0
    for epoch, point in enumerate(points):
        if point >= target:
            return epoch + (target - before) / (point - before)
        before = point
    return float("inf")


def table(found: dict[str, dict[str, list[float]]]) -> None:
    print("| labels | sampler | 6 epochs | seeds | epochs to uniform's |\n|---|---|---|---|---|")
    for key, seeds in found.items():
        noise = key.partition(", ")[0]
        base = found.get(f"{noise}, uniform", {})
        last = [points[-1] for points in seeds.values()]
        spread = f" ± {stdev(last):.1f}" if len(last) > 1 else ""
        reached = [needed(seeds[s], base[s][-1]) for s in seeds if s in base]
        said = ", ".join("not" if x == float("inf") else f"{x:.1f}" for x in reached)
        name = key.partition(", ")[2]
        print(f"| {noise} | {name} | {mean(last):.1f}{spread} % | {len(last)} | {said} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.2])
    options = parser.parse_args()
    images, test = data.load("cifar10", options.data_dir, 20_000)
    for seed in options.seeds:
        for noise in options.noise:
            for name in options.rows:
                found = json.loads(FILE.read_text()) if FILE.exists() else {}
                rows = found.setdefault(options.model, {})
                seeds = rows.setdefault(f"{100 * (1 - noise):.0f} % right, {name}", {})
                if str(seed) in seeds:
                    continue
                points = curve(ROWS[name], noisy(images, noise), test, seed, options.model)
                seeds[str(seed)] = [round(x, 2) for x in points]
                FILE.write_text(json.dumps(found, indent=1) + "\n")
    for model, rows in json.loads(FILE.read_text()).items():
        print(f"\n{model}\n")
        table(rows)


if __name__ == "__main__":
    main()
