"""Every sample once per epoch, in random order or in that of the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.data.dataset import Data, Order
from hybrid.data.samplers.base import Choice, Sampler
from hybrid.data.sampling import epoch_order

_order = lru_cache(maxsize=2)(epoch_order)


@dataclass(frozen=True)
class Uniform(Sampler):
    """A permutation of the training set, a pure function of (seed, epoch).

    Where a DataLoader's sampler, or a stream, gives the order of an epoch, it is that.
    """

    name: ClassVar[str] = "uniform"
    keeps_order = True

    def start(self, data: Data, seed: int) -> Choice:
        if data.streamed:
            return AsTheyCome(data, seed)
        return Permutations(data, seed) if data.order is None else OfData(data, seed, data.order)


class Permutations(Choice):
    """A permutation for each epoch."""

    repeats = False

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        return _order(self.seed, epoch, self.count)[first : first + count]


class AsTheyCome(Choice):
    """The samples of a stream."""

    repeats = False

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count)


class OfData(Choice):
    """The order that a DataLoader's sampler gives in each epoch."""

    def __init__(self, data: Data, seed: int, order: Order) -> None:
        super().__init__(data, seed)
        self.order = order

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        return self.order.of_epoch(self.seed, epoch)[first : first + count]

    def batches(self, batch_size: int) -> int:
        return len(self.order.of_epoch(self.seed, 0)) // batch_size
