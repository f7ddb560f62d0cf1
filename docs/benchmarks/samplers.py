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

from collections.abc import Mapping
from dataclasses import replace

import measuring
import torch

from hybrid import Callback, Trainer, data, split
from hybrid.data import Dataset
from hybrid.data.samplers import Sampler, Uniform
from hybrid.data.sampling import uniform
from hybrid.solvers import Backprop
from hybrid_samplers import AutoAssist, SelectiveBackprop

RAW = measuring.Raw(__file__)
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
    seen = Curve()
    Trainer(
        split(measuring.resnet(model, seed), 1),
        Backprop(),
        sampler=sampler,
        train={"epochs": EPOCHS, "seed": seed, "threads": 1},
        optimizer={"lr": 0.1},
        callbacks=[seen],
        quiet=True,
    ).fit(images, test)
    return [round(x, 2) for x in seen.points]


def needed(points: list[float], target: float) -> float:
    """Epochs until the target, between two by a straight line; infinite if it is not reached."""
    before = 0.0
    for epoch, point in enumerate(points):
        if point >= target:
            return epoch + (target - before) / (point - before)
        before = point
    return float("inf")


def cells(key: str, figures: dict[str, dict[str, list[float]]]) -> tuple[object, ...]:
    """A row of the table."""
    noise, _, name = key.partition(", ")
    seeds, base = figures[key], figures.get(f"{noise}, uniform", {})
    last = [points[-1] for points in seeds.values()]
    reached = [needed(seeds[s], base[s][-1]) for s in seeds if s in base]
    epochs = ", ".join("not" if x == float("inf") else f"{x:.1f}" for x in reached)
    return noise, name, f"{measuring.spread(last)} %", len(last), epochs


def main() -> None:
    options = measuring.options(
        __doc__,
        data_dir=measuring.DATA,
        model="resnet20",
        seeds=[0],
        rows=[*ROWS],
        noise=[0.0, 0.2],
    )
    images, test = data.load("cifar10", options.data_dir, 20_000)
    for seed in options.seeds:
        for noise in options.noise:
            for name in options.rows:
                key = options.model, f"{100 * (1 - noise):.0f} % right, {name}", str(seed)
                if not RAW.get(*key):
                    points = curve(ROWS[name], noisy(images, noise), test, seed, options.model)
                    RAW.keep(*key, value=points)
    for model, rows in RAW.read().items():
        print(f"\n{model}\n")
        header = "labels | sampler | 6 epochs | seeds | epochs to uniform's"
        measuring.show(header, (cells(key, rows) for key in rows))


if __name__ == "__main__":
    main()
