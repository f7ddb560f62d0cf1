"""What a sampler is: the same choice on every rank, without talking."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Sampler(ABC):
    """Chooses which of `count` training samples make which mini-batch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    @abstractmethod
    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        """Ids (count,) of the samples first .. first + count - 1 of an epoch."""

    def length(self, batch_size: int) -> int:
        """Mini-batches an epoch; an incomplete last one is left out."""
        return self.count // batch_size
