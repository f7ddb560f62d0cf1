"""An epoch of mini-batches, cut into the windows of its rounds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from hybrid.data import Data
from hybrid.data.mixing import Mix
from hybrid.data.sampling import epoch_order
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.solvers.windows import Batch, Window, on_its_way

Rate = Callable[[int], float]
"""The learning rate of step 0, 1, ...: a function of the step alone, the same on every rank."""

BN_BATCHES = 32
"""Mini-batches after which running statistics are those of the weights: 0.9^32 is 3 %."""


@dataclass(frozen=True)
class EpochSource:
    """A data set as one epoch sees it.

    It is a pure function of (seed, epoch, sample), or of (seed, epoch, mini-batch) with mixing.
    """

    data: Data
    seed: int
    epoch: int
    augment: bool
    device: torch.device
    mix: Mix | None = None

    @property
    def mixes(self) -> bool:
        return self.augment and self.mix is not None

    @property
    def joint(self) -> bool:
        return self.data.joint

    def images(self, ids: Tensor, step: int) -> Tensor:
        plain = ids, self.seed, self.epoch, self.augment
        inputs = self._mixed(ids, step)[0] if self.mixes else self.data.batch(*plain)
        return on_its_way(inputs, self.device)

    def labels(self, ids: Tensor, step: int) -> Tensor:
        if self.mixes:
            return on_its_way(self._mixed(ids, step)[1], self.device)
        return on_its_way(self.data.targets(ids, self.seed, self.epoch), self.device)

    def _mixed(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        assert self.mix is not None
        inputs = self.data.batch(ids, self.seed, self.epoch)
        return self.mix(inputs, self.data.targets(ids, self.seed, self.epoch), self.seed, step)


@dataclass(frozen=True)
class Windows:
    """Makes the windows of any epoch, the same on every rank without communication.

    An incomplete last mini-batch is left out, and the last window of an epoch may be shorter. A
    window of the `whole` training set is stored per sample: sweeps draw new mini-batches from it.
    It is recorded from images without augmentation, so the swept window differs from the trained.
    """

    data: Data
    sampler: BatchSampler
    window: int
    """Mini-batches of a round."""
    whole: bool
    sweeps: int
    seed: int
    schedule: Rate
    device: torch.device
    carried: bool = False
    """Whether a whole set's records outlive the epoch: they then keep the first one's order."""
    mix: Mix | None = None
    replica: int = 0
    """The replica that trains on this share of every mini-batch."""
    replicas: int = 1

    def of_epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Window, Window]]:
        """(trained, swept) for every round; the same window unless recorded apart.

        `start` is the mini-batch of the epoch to begin with.
        """
        batches = self.sampler.steps
        apart = self.whole and (self.carried or self.data.augmented)
        if not self.sampler.learns:
            self._expect(epoch, range(batches))
        while start < batches:
            numbers = range(start, min(start + self.window, batches))
            if self.sampler.learns:
                self._expect(epoch, numbers)
            swept = trained = Window(self._batches(epoch, numbers), self.sweeps)
            if apart:
                swept = Window(self._batches(epoch, numbers, augment=False), self.sweeps)
            if self.whole:
                n = sum(len(batch) for batch in swept.batches)
                swept.shuffle = lambda sweep, n=n: epoch_order(self.seed + 1 + sweep, epoch, n)
            yield trained, swept
            start = numbers.stop

    def _expect(self, epoch: int, numbers: range) -> None:
        """Let the data prepare the mini-batches that will be asked for."""
        order = self.sampler.ids(epoch, numbers)
        if not self._source(epoch).mixes:
            order = [ids.tensor_split(self.replicas)[self.replica] for ids in order]
        self.data.expect(order, self.seed, epoch)

    def before(self, epoch: int, step: int) -> list[Batch]:
        """The mini-batches of an epoch that come before a step."""
        batches = (batch for trained, _ in self.of_epoch(epoch) for batch in trained.batches)
        return [*islice(batches, step - epoch * self.sampler.steps)]

    def bn_recalibration(self, epoch: int) -> Window:
        """The epoch's last mini-batches, `BN_BATCHES` at most, however it is cut into windows."""
        batches = self.sampler.steps
        return Window(self._batches(epoch, range(max(0, batches - BN_BATCHES), batches)))

    def _batches(self, epoch: int, numbers: range, augment: bool = True) -> list[Batch]:
        """This replica's share of mini-batches of an epoch; plain ones may keep the first order."""
        order = 0 if self.carried and not augment else epoch
        source, batches = self._source(epoch, augment), []
        for i, ids in zip(numbers, self.sampler.ids(order, numbers), strict=True):
            step = epoch * self.sampler.steps + i
            batch = Batch(ids, self.schedule(step), source, step)
            batches.append(batch.of_replica(self.replica, self.replicas))
        return batches

    def _source(self, epoch: int, augment: bool = True) -> EpochSource:
        return EpochSource(self.data, self.seed, epoch, augment, self.device, self.mix)

    def groups(
        self, epoch: int, from_step: int, every: int
    ) -> Iterator[list[tuple[Window, Window]]]:
        """The epoch's windows from a step on, in groups of at least `every` mini-batches."""
        steps = self.sampler.steps
        first, done, end = epoch * steps, from_step, (epoch + 1) * steps
        group: list[tuple[Window, Window]] = []
        for pair in self.of_epoch(epoch, from_step - first):
            done += len(pair[0].batches)
            group.append(pair)
            if sum(len(trained.batches) for trained, _ in group) >= every or done == end:
                yield group
                group = []
