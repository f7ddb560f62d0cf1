"""The digits as a data set of a user's own, whose transforms draw: workers make its items."""

from __future__ import annotations

import json
import os
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid.data import Dataset, load
from tests.faults.training import SAMPLES

FAULT = json.loads(os.environ.get("HYBRID_FAULT", "{}"))
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0"))
MINE = FAULT.get("kind") if FAULT.get("rank") == RANK else None
"""What is wrong with this rank's data: they are other ones, or an item never comes."""
SECONDS = 15.0
"""That a mini-batch may take."""


class Items:
    """(image with noise, class)."""

    def __init__(self, of: Dataset, noise: float) -> None:
        self.images, self.labels, self.noise = of.images, of.labels, noise
        self.classes = range(of.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if MINE == "hanging item" and i == FAULT["item"]:
            sleep(1000)
        if MINE == "other items":
            i = (i + 1) % len(self.labels)
        drawn = self.noise * torch.randn(self.images[i].shape)
        return self.images[i] / 16 + drawn, int(self.labels[i])


def digits() -> tuple[DataLoader[Items], Items]:
    """Training and test data."""
    train, test = load("digits", "", SAMPLES)
    made = DataLoader(Items(train, 0.05), batch_size=8, shuffle=True, timeout=SECONDS)
    return made, Items(test, 0.0)


def head(index: int, shape: Any, output: Any) -> nn.Module:
    """An auxiliary head with BatchNorm and dropout."""
    norm = nn.BatchNorm2d(shape[0])
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)
    return nn.Sequential(norm, *pool, nn.Linear(shape[0], *output))
