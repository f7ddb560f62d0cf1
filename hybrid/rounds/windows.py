"""An epoch of mini-batches, cut into the windows of its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybrid.data import Dataset
from hybrid.data.sampling import batches, epoch_order
from hybrid.rounds.schedule import Schedule
from solvers.base import Batch, Recorder, Window


@dataclass(frozen=True)
class EpochSource:
    """A data set as one epoch sees it: a pure function of (seed, epoch, sample)."""

    data: Dataset
    seed: int
    epoch: int
    augment: bool
    device: torch.device

    def images(self, ids: Tensor) -> Tensor:
        """Normalised images (N, C, H, W)."""
        return self.data.batch(ids, self.seed, self.epoch, self.augment).to(self.device)

    def labels(self, ids: Tensor) -> Tensor:
        """Classes (N,)."""
        return self.data.targets(ids).to(self.device)


@dataclass(frozen=True)
class Windows:
    """Makes the windows of any epoch, the same on every rank without talking.

    The mini-batches are a permutation of the training set; an incomplete last one is left out, and
    the last window of an epoch may be shorter. A window of the `whole` training set is stored per
    sample: sweeps draw new mini-batches from it, and if the images are augmented it is recorded
    from the plain ones, so what is swept differs from what is trained.
    """

    data: Dataset
    batch_size: int
    length: int
    """Mini-batches a window."""
    whole: bool
    sweeps: int
    seed: int
    schedule: Schedule
    device: torch.device
    recorder: Recorder | None
    kept: bool = False
    """Whether a whole set's records outlive the epoch: they then keep the first one's order."""

    @property
    def records_apart(self) -> bool:
        """Whether the store is recorded in a pass of its own."""
        augmentation = self.data.augmentation
        augmented = bool(augmentation.pad or augmentation.flip or augmentation.cutout)
        return self.whole and (augmented or self.kept)

    def of_epoch(self, epoch: int, first_step: int) -> Iterator[tuple[Window, Window]]:
        """(trained, swept) for every round; the same window unless recorded apart."""
        count = len(self.data)
        orders = {
            order: batches(epoch_order(self.seed, order, count), self.batch_size)
            for order in {epoch, 0 if self.kept else epoch}
        }

        def window(start: int, augment: bool, order: int) -> Window:
            ids = orders[order]
            source = EpochSource(self.data, self.seed, epoch, augment, self.device)
            chunk = range(start, min(start + self.length, len(ids)))
            made = [Batch(ids[i], self.schedule(first_step + i), source) for i in chunk]
            return Window(made, self.sweeps, self.recorder)

        for start in range(0, count // self.batch_size, self.length):
            trained = window(start, True, epoch)
            swept = trained
            if self.records_apart:
                trained.recorder, swept = None, window(start, False, 0 if self.kept else epoch)
                swept.kept = self.kept
            if self.whole:
                samples = sum(len(batch) for batch in swept.batches)
                swept.shuffle = partial(self._permutation, epoch, samples)
            yield trained, swept

    def _permutation(self, epoch: int, samples: int, sweep: int) -> Tensor:
        return epoch_order(self.seed + 1 + sweep, epoch, samples)
