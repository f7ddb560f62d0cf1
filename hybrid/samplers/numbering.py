"""Numbers of samples that are taken more than once in an epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.samplers.base import Choice


class Numbering:
    """The v-th time, from 0, that an epoch takes sample i of N, its number is i + v N.

    A number is a function of the choice alone, so it is the same after a resume.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._counted = -1, 0
        """The epoch, and how many of its samples are in `_times`."""
        self._times = torch.zeros(choice.count, dtype=torch.int64)
        """How often the epoch has taken each sample."""

    def number_samples(self, epoch: int, first: int, ids: Tensor) -> Tensor:
        """Numbers (B,) of the samples `ids` (B,) that an epoch takes from its `first` on.

        ValueError for a sample that the data set does not have.
        """
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(
                f"the sampler's choice is {tuple(ids.shape)} of {ids.dtype}; it must be (count,) "
                "of torch.int64"
            )
        wrong = ids[(ids < 0) | (ids >= self.choice.count)]
        if len(wrong):
            raise ValueError(
                f"the sampler chose sample {int(wrong[0])} of a data set of {self.choice.count}: "
                f"let it choose from 0 to {self.choice.count - 1}"
            )
        if (epoch, first) != self._counted:
            earlier = self.choice.choose(epoch, 0, first) if first else ids[:0]
            self._times = earlier.bincount(minlength=self.choice.count)
        numbers = ids + self.choice.count * (self._times[ids] + _count_earlier(ids))
        self._times += ids.bincount(minlength=self.choice.count)
        self._counted = epoch, first + len(ids)
        return numbers


def _count_earlier(ids: Tensor) -> Tensor:
    """How often each of `ids` (B,) stands before its place."""
    order = ids.argsort(stable=True)
    sorted_, place = ids[order], torch.arange(len(ids))
    begins = torch.cat([place[:1] == 0, sorted_[1:] != sorted_[:-1]])
    earlier = torch.empty_like(ids)
    earlier[order] = place - torch.where(begins, place, 0).cummax(0).values
    return earlier
