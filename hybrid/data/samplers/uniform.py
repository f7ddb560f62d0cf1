"""Every sample once in each epoch, in random order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.data.samplers.base import Choice, Sampler
from hybrid.data.sampling import epoch_order

_order = lru_cache(maxsize=2)(epoch_order)


@dataclass(frozen=True)
class Uniform(Sampler):
    """A permutation of the training set, a pure function of (seed, epoch)."""

    name: ClassVar[str] = "uniform"

    def start(self, data: Data, seed: int) -> Choice:
        return Permutations(data, seed)


class Permutations(Choice):
    """A permutation for each epoch."""

    repeats = False

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        return _order(self.seed, epoch, self.count)[first : first + count]
