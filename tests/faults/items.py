"""The digits as a data set of a user's own, whose transforms draw: workers make its items."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.data import Dataset, load
from tests.faults.training import SAMPLES


class Items:
    """(image with noise, class)."""

    def __init__(self, of: Dataset, noise: float) -> None:
        self.images, self.labels, self.noise = of.images, of.labels, noise
        self.classes = range(of.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        drawn = self.noise * torch.randn(self.images[i].shape)
        return self.images[i] / 16 + drawn, int(self.labels[i])


def digits() -> tuple[Items, Items]:
    """Training and test data."""
    train, test = load("digits", "", SAMPLES)
    return Items(train, 0.05), Items(test, 0.0)
