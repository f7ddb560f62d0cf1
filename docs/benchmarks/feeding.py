"""Images/s of two ranks fed by a data set of Python transforms, over the in-memory one's.

    mpirun -n 2 --bind-to none python docs/benchmarks/feeding.py --data-dir ~/data

ResNet-20, batch 128, two blocks, backprop with 4 micro-batches, one thread a rank, by turns.
An item is cut out of the padded image, mirrored and normalized one by one, in Python.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from hybrid import Trainer, TrainSettings, data, split
from hybrid.networks import models
from hybrid.ranks import launch
from hybrid.solvers import Backprop

IMAGES = 128 * 24


class Transformed(Dataset[tuple[Tensor, int]]):
    """CIFAR-10's images as a user's data set: crop, flip, normalize."""

    def __init__(self, images: data.Dataset) -> None:
        self.images, self.labels = images.images, images.labels.tolist()
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (images.mean, images.std))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = F.pad(self.images[number], (4, 4, 4, 4))
        top, left = random.randrange(9), random.randrange(9)
        image = image[:, top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - self.mean) / self.std, self.labels[number]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    train, test = data.load("cifar10", options.data_dir, IMAGES)
    test = test.take(128)
    rows: dict[str, Any] = {"in memory": lambda: train}
    ways: dict[str, dict[str, Any]] = {
        "waited for": {},
        "1 thread ahead": {"workers": 1},
        "1 process ahead": {"workers": 1, "worker_kind": "forkserver"},
    }
    for name, way in ways.items():
        rows[name] = lambda way=way: data.Mapped(Transformed(train), augmented=True, **way)
    rates: dict[str, list[float]] = {name: [] for name in rows}
    comm = launch.communicator()
    for _ in range(options.turns):
        for name, fed in rows.items():
            torch.manual_seed(0)
            blocks = split(models.resnet(depth=20, classes=10), 2)
            settings = TrainSettings(epochs=1, threads=1, evaluate_every=1)
            made = Trainer(blocks, Backprop(micro_batches=4), train=settings, quiet=True)
            rates[name].append(made.fit(fed(), test)["images_per_second"])
    if comm is not None and comm.rank:
        return
    base = rates["in memory"]
    print("| | images/s | of the in-memory rate, median (quartiles) |\n|---|---|---|")
    for name, found in rates.items():
        share = [a / b for a, b in zip(found, base, strict=True)]
        low, _, high = quantiles(share, n=4)
        print(f"| {name} | {median(found):.0f} | {median(share):.3f} ({low:.3f}, {high:.3f}) |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
