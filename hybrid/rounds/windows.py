"""An epoch of mini-batches, cut into the windows of its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybrid.data import Data
from hybrid.data.mixing import Mix
from hybrid.data.sampling import epoch_order
from hybrid.optimizers.schedule import Rate
from hybrid.rounds.controller import Controller
from hybrid.samplers.batch_sampler import BatchSampler
from solvers.windows import Batch, Window

CLOSING = 32
"""Mini-batches after which running statistics are those of the weights: 0.9^32 is 3 %."""


@dataclass(frozen=True)
class EpochSource:
    """A data set as one epoch sees it: a pure function of (seed, epoch, sample).

    Where mini-batches are mixed, of (seed, epoch, mini-batch).
    """

    data: Data
    seed: int
    epoch: int
    augment: bool
    device: torch.device
    mix: Mix | None = None

    @property
    def mixes(self) -> bool:
        """Whether a part of a mini-batch is to be taken from the whole."""
        return self._transforms or self.data.together

    @property
    def _transforms(self) -> bool:
        return self.mix is not None and self.augment

    def images(self, ids: Tensor, step: int) -> Tensor:
        """Inputs (N, ...), such as normalized images (N, C, H, W)."""
        inputs = self.data.batch(ids, self.seed, self.epoch, self.augment)
        return (self._mixed(inputs, ids, step)[0] if self._transforms else inputs).to(self.device)

    def labels(self, ids: Tensor, step: int) -> Tensor:
        """Targets (N, ...), such as classes (N,)."""
        if not self._transforms:
            return self.data.targets(ids, self.seed, self.epoch).to(self.device)
        inputs = self.data.batch(ids, self.seed, self.epoch, self.augment)
        return self._mixed(inputs, ids, step)[1].to(self.device)

    def _mixed(self, inputs: Tensor, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        assert self.mix is not None
        return self.mix(inputs, self.data.targets(ids, self.seed, self.epoch), self.seed, step)


@dataclass(frozen=True)
class Windows:
    """Makes the windows of any epoch, the same on every rank without talking.

    An incomplete last mini-batch is left out, and the last window of an epoch may be shorter. A
    window of the `whole` training set is stored per sample: sweeps draw new mini-batches from it,
    and if the images are augmented it is recorded from the plain ones, so what is swept differs
    from what is trained.
    """

    data: Data
    chosen: BatchSampler
    round_batches: int
    """Mini-batches of a round."""
    whole: bool
    sweeps: int
    seed: int
    schedule: Rate
    device: torch.device
    carried: bool = False
    """Whether a whole set's records outlive the epoch: they then keep the first one's order."""
    mix: Mix | None = None
    controller: Controller | None = None
    """What chooses window and sweeps anew for every round; None: they stay."""
    replica: int = 0
    """Whose share of every mini-batch this is."""
    replicas: int = 1

    def of_epoch(
        self, epoch: int, first_step: int, start: int = 0
    ) -> Iterator[tuple[Window, Window]]:
        """(trained, swept) for every round; the same window unless recorded apart.

        `first_step` is the epoch's first, `start` the mini-batch of it to begin with.
        """
        batches = self.chosen.steps
        apart = self.whole and (self.carried or self.data.augmented)

        def window(numbers: range, sweeps: int, augment: bool, order: int) -> Window:
            source = EpochSource(self.data, self.seed, epoch, augment, self.device, self.mix)
            made = []
            for i, ids in zip(numbers, self.chosen.ids(order, numbers), strict=True):
                step = first_step + i
                made.append(self._mine(Batch(ids, self.schedule(step), source, step)))
            return Window(made, sweeps)

        if not self.chosen.learns:
            self._expect(epoch, range(batches))
        while start < batches:
            length, sweeps = self._pace
            numbers = range(start, min(start + length, batches))
            if self.chosen.learns:
                self._expect(epoch, numbers)
            trained = window(numbers, sweeps, True, epoch)
            swept = trained
            if apart:
                swept = window(numbers, sweeps, False, 0 if self.carried else epoch)
            if self.whole:
                samples = sum(len(batch) for batch in swept.batches)
                swept.shuffle = partial(self._permutation, epoch, samples)
            yield trained, swept
            start = numbers.stop

    def _expect(self, epoch: int, numbers: range) -> None:
        """Tell the data of mini-batches that will be asked for."""
        order = self.chosen.ids(epoch, numbers)
        if not EpochSource(self.data, self.seed, epoch, True, self.device, self.mix).mixes:
            order = [ids.tensor_split(self.replicas)[self.replica] for ids in order]
        self.data.expect(order, self.seed, epoch)

    @property
    def _pace(self) -> tuple[int, int]:
        """Mini-batches and sweeps of the next window."""
        if self.controller is None:
            return self.round_batches, self.sweeps
        return self.controller.now.window, self.controller.now.sweeps

    def before(self, epoch: int, step: int) -> list[Batch]:
        """The mini-batches of an epoch before a step."""
        first, made = epoch * self.chosen.steps, list[Batch]()
        for trained, _ in self.of_epoch(epoch, first) if step > first else ():
            made += trained.batches
            if len(made) >= step - first:
                break
        return made[: step - first]

    def closing(self, epoch: int) -> Window:
        """The epoch's last mini-batches, `CLOSING` at most, however it is cut into windows."""
        batches = self.chosen.steps
        source = EpochSource(self.data, self.seed, epoch, True, self.device, self.mix)
        made, numbers = [], range(max(0, batches - CLOSING), batches)
        for i, ids in zip(numbers, self.chosen.ids(epoch, numbers), strict=True):
            step = epoch * batches + i
            made.append(self._mine(Batch(ids, self.schedule(step), source, step)))
        return Window(made)

    def _mine(self, batch: Batch) -> Batch:
        return batch.of_replica(self.replica, self.replicas)

    def groups(
        self, epoch: int, from_step: int, every: int
    ) -> Iterator[list[tuple[Window, Window]]]:
        """The epoch's windows from a step on, in groups of at least `every` mini-batches."""
        steps = self.chosen.steps
        first, done, end = epoch * steps, from_step, (epoch + 1) * steps
        group: list[tuple[Window, Window]] = []
        for pair in self.of_epoch(epoch, first, from_step - first):
            done += len(pair[0].batches)
            group.append(pair)
            if sum(len(trained.batches) for trained, _ in group) >= every or done == end:
                yield group
                group = []

    def _permutation(self, epoch: int, samples: int, sweep: int) -> Tensor:
        return epoch_order(self.seed + 1 + sweep, epoch, samples)
