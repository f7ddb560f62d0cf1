"""The mini-batches of an epoch, the same on every rank, and the way back of their losses."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid.data.dataset import Data, numbered
from hybrid.data.samplers.base import Learning, Sampler, check_ids, check_tensor
from hybrid.errors import AgreedError, one_line
from hybrid.links import RankLinks
from hybrid.solvers.state import State, entries


class BatchSampler:
    """Mini-batches of `size` samples as a sampler chooses them.

    A sampler that needs no losses chooses on every rank. One that learns lives on the rank of the
    first replica's last block, which has the losses, and sends its choice to all ranks; they ask
    for the same mini-batches at the same time.
    """

    def __init__(
        self, sampler: Sampler, data: Data, seed: int, size: int, links: RankLinks | None = None
    ) -> None:
        self.sampler, self.size, self.links = sampler, size, links
        self.learns = isinstance(sampler, Learning)
        self.choice = sampler.start(data, seed)
        self.steps = self.choice.batches(size)
        """Mini-batches of an epoch."""
        place = None if links is None else links.place
        self._chooses = place is None or (not place.replica and place.block == place.blocks - 1)
        self._replicas = 1 if place is None else place.replicas
        self._counted = -1, 0
        """The epoch, and how many of its samples are in `_times`."""
        self._times = Counter[int]()
        """How often the epoch has taken each sample."""
        self._epoch = -1
        self._ids: dict[int, Tensor] = {}
        """The sample numbers of this epoch's mini-batches that have been asked for."""
        self._next = 0
        """The step of the first mini-batch that has never been asked for."""
        self._without_losses: deque[tuple[int, Tensor]] = deque()
        """Steps and samples of the mini-batches in the next report of losses."""
        self._with_losses: deque[tuple[int, Tensor, Tensor]] = deque()
        """Mini-batches with losses that the sampler may not use yet, because of its lag."""

    def ids(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        """Numbers (size,), int64, of the samples of an epoch's mini-batches; all ranks call it.

        A sample that is taken again has another number each time: see `Data`.
        """
        if not self.choice.repeats:
            return [self.choice.choose(epoch, i * self.size, self.size) for i in numbers]
        if epoch != self._epoch:
            self._epoch, self._ids = epoch, {}
        new = [i for i in numbers if i not in self._ids]
        if new:
            choose = self._choose_for_all if self.learns else self._choose_each
            self._ids |= dict(zip(new, choose(epoch, new), strict=True))
        return [self._ids[i] for i in numbers]

    def _choose_for_all(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        """The choice of the rank that the sampler lives on, sent to all ranks.

        All need it: the first blocks for inputs, the last for targets, those between for what
        random layers draw and for the rows of what they store. It is 8 bytes a sample.
        """
        choice: list[Tensor] | str | None = None
        if self._chooses:
            try:
                choice = self._choose_each(epoch, numbers)
            except (ValueError, OSError) as error:
                choice = one_line(error)
        if self.links is not None:
            choice = self.links.broadcast(choice, at=self.links.size - 1)
        if isinstance(choice, str):
            raise AgreedError(choice)
        assert choice is not None
        return choice

    def _choose_each(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        chosen = []
        for number in numbers:
            first = number * self.size
            step = epoch * self.steps + number
            if isinstance(self.sampler, Learning):
                while self._with_losses and self._with_losses[0][0] <= step - self.sampler.lag:
                    _, ids, losses = self._with_losses.popleft()
                    self.choice.learn(ids, losses)
            ids = self.choice.choose(epoch, first, self.size)
            if self.learns and step >= self._next:
                self._next = step + 1
                self._without_losses.append((step, ids))
            chosen.append(self._number_samples(epoch, first, ids))
        return chosen

    def _number_samples(self, epoch: int, first: int, ids: Tensor) -> Tensor:
        """Numbers (B,) of the samples `ids` (B,) that an epoch takes from its `first` on.

        The v-th time, from 0, that it takes sample i of N, the number is i + v N: a function of the
        choice alone, the same after a resume. ValueError for a sample that the data set lacks.
        """
        ids = check_ids("choice", ids, None, self.choice.count)
        if (epoch, first) != self._counted:
            earlier = self.choice.choose(epoch, 0, first).tolist() if first else []
            self._times = Counter(earlier)
        self._counted = epoch, first + len(ids)
        return numbered(ids, self.choice.count, self._times)

    def take_losses(self, losses: Sequence[Sequence[Tensor]]) -> None:
        """Take the losses (N,) that each replica's last block had since the last call, in order."""
        if not self.learns or not self._chooses:
            return
        shares = [ids.tensor_split(self._replicas) for _, ids in self._without_losses]
        sizes = [[len(ids) for ids in of_replica] for of_replica in zip(*shares, strict=True)]
        per_replica = [torch.cat([torch.empty(0), *each]) for each in losses]
        if sizes and [*map(len, per_replica)] != [*map(sum, sizes)]:
            raise ValueError(
                f"sampler {self.sampler.name!r} has {sum(map(len, per_replica))} losses of "
                f"{sum(map(sum, sizes))} samples: take a solver that reports the loss of every "
                "one, or sampler.name=uniform"
            )
        parts = [x.split(each) for x, each in zip(per_replica, sizes, strict=False)]
        for (step, ids), share in zip(self._without_losses, zip(*parts, strict=True), strict=True):
            self._with_losses.append((step, ids, torch.cat(share)))
        self._without_losses.clear()

    def share_statistics(self) -> dict[str, Any]:
        """The sampler's statistics of the epoch, the same on every rank; all ranks call it."""
        if not self.learns or self.links is None:
            return {}
        last = self.links.size - 1
        return self.links.broadcast(self.choice.epoch_statistics(), at=last)

    def state(self) -> State:
        if not self._chooses:
            return State()
        sampler_state = self.choice.state()
        if self.learns:
            for step, ids, losses in self._with_losses:
                sampler_state.block[f"late {step:012d} ids"] = ids
                sampler_state.block[f"late {step:012d} losses"] = losses
            sampler_state.block["next"] = torch.tensor(self._next)
        return sampler_state

    def load_state(self, state: State) -> None:
        self._epoch, self._ids = -1, {}
        self.choice.load_state(state)
        if not self.learns or not self._chooses or "next" not in state.block:
            return
        self._next = int(check_tensor("next", state.block["next"], torch.int64, ()))
        late = entries(state.block, "late ")
        self._without_losses.clear()
        self._with_losses.clear()
        for step in sorted({name.split()[0] for name in late}):
            ids, losses = late[f"{step} ids"], late[f"{step} losses"]
            dtype = losses.dtype if losses.is_floating_point() else torch.float32
            ids = check_ids(f"ids of step {step}", ids, self.size, self.choice.count)
            losses = check_tensor(f"losses of step {step}", losses, dtype, (self.size,))
            self._with_losses.append((int(step), ids, losses))
