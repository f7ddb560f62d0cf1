"""Every sample once per epoch, in random order or in that of the data."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.data.samplers.base import Choice, Sampler
from hybrid.data.sampling import kept_order


@dataclass(frozen=True)
class Uniform(Sampler):
    """A permutation of the training set, a pure function of (seed, epoch).

    Where a DataLoader's sampler, or a stream, gives the order of an epoch, it is that.
    """

    name: ClassVar[str] = "uniform"
    keeps_order = True

    def start(self, data: Data, seed: int) -> Choice:
        return AsTheyCome(data, seed) if data.streamed else Permutations(data, seed)


class Permutations(Choice):
    """A permutation for each epoch, or the order that a DataLoader's sampler gives."""

    repeats = False

    def _order(self, epoch: int) -> Tensor:
        if self.data.order is not None:
            return self.data.order.of_epoch(self.seed, epoch)
        return kept_order(self.seed, epoch, self.count)

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        return self._order(epoch)[first : first + count]

    def batches(self, batch_size: int) -> int:
        return len(self._order(0)) // batch_size


class AsTheyCome(Choice):
    """The samples of a stream."""

    repeats = False

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count)
