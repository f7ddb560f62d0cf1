"""A little data of many kinds, made in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import pi
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torch.utils._pytree import tree_map

TRAIN, TEST = 32, 24
"""Samples to train and to test with."""
LENGTH = 24
"""Characters of a line of text."""


@dataclass
class Rows:
    """A map-style data set: a row of every tensor."""

    inputs: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.inputs if isinstance(self.inputs, Tensor) else self.inputs["tokens"])

    def __getitem__(self, i: int | Tensor) -> Any:
        inputs, targets = tree_map(lambda x: x[i], (self.inputs, self.targets))
        return {**inputs, "target": targets} if isinstance(inputs, dict) else (inputs, targets)

    @property
    def data(self) -> Any:
        """As `fit` is given it: a pair of tensors where that is all."""
        pair = self.inputs, self.targets
        return pair if all(isinstance(x, Tensor) for x in pair) else self

    def parted(self) -> tuple[Rows, Rows]:
        """The first rows to train with, the next ones to test with."""
        ends = slice(TRAIN), slice(TRAIN, TRAIN + TEST)
        first, second = (tree_map(lambda x, e=e: x[e], (self.inputs, self.targets)) for e in ends)
        return Rows(*first), Rows(*second)


def images(side: int = 32, channels: int = 3) -> Rows:
    """Colored noise, brighter where its class says."""
    x, y = _noise(channels, side, side), torch.arange(TRAIN + TEST) % 4
    corner = side // 2
    for i, k in enumerate(y.tolist()):
        x[i, :, corner * (k // 2) :, corner * (k % 2) :] += 0.5
    return Rows(x, y)


def pixels() -> Rows:
    """Smooth images, each of whose pixels is of one of three classes by its value."""
    x = avg_pool2d(_noise(1, 16, 16), 3, 1, 1)
    return Rows(x, (x[:, 0] > -0.15).long() + (x[:, 0] > 0.15))


def waves() -> Rows:
    """Noisy waves of three frequencies."""
    y = torch.arange(TRAIN + TEST) % 3
    time = torch.arange(64) * 2 * pi / 64
    return Rows(torch.sin((2 + 3 * y)[:, None, None] * time) + 0.3 * _noise(1, 64), y)


def text() -> Rows:
    """The characters of a file, and which one follows each."""
    whole = Path(__file__).read_text()
    known = {c: i for i, c in enumerate(sorted(set(whole)))}
    numbers = torch.tensor([known[c] for c in whole])
    at = torch.arange(TRAIN + TEST)[:, None] * LENGTH + torch.arange(LENGTH)
    return Rows(numbers[at], numbers[at + 1])


def sentences() -> Rows:
    """Up to eight words, their mask, and whether a word is among them."""
    tokens = torch.randint(1, 20, (TRAIN + TEST, 8), generator=_random())
    mask = (torch.arange(8) < 3 + torch.arange(TRAIN + TEST)[:, None] % 6).long()
    return Rows({"tokens": tokens * mask, "mask": mask}, (tokens * mask == 7).any(1).long())


@cache
def diabetes() -> Rows:
    """scikit-learn's, progress in a year standardized."""
    x, y = (torch.tensor(x, dtype=torch.float32) for x in load_diabetes(return_X_y=True))
    return Rows(20 * x, (y - y.mean()) / y.std())


def kinds() -> Rows:
    x = _noise(10)
    size = x.norm(dim=1, keepdim=True)
    return Rows(x, ((x[:, 0] > x[:, 1]).long(), size - size.mean()))


def _noise(*shape: int) -> Tensor:
    return torch.randn(TRAIN + TEST, *shape, generator=_random())


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)
