"""The mini-batches of an epoch, the same on every rank, and the way back of their losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid.data.base import Data
from hybrid.errors import AgreedError, one_line
from hybrid.links import RankLinks
from hybrid.samplers.base import Learning, Sampler, check_kept
from hybrid.samplers.numbering import Numbering
from solvers.state import State, entries


class BatchSampler:
    """Mini-batches of `size` samples as a sampler chooses them.

    What chooses without losses does so on every rank. One that learns lives on the last block of
    the first replica, where losses are; of its choice all ranks are told, and they ask for the
    same mini-batches at the same time.
    """

    def __init__(
        self, sampler: Sampler, data: Data, seed: int, size: int, links: RankLinks | None = None
    ) -> None:
        self.sampler, self.size, self.links = sampler, size, links
        self.learns = isinstance(sampler, Learning)
        self.choice = sampler.start(data, seed)
        self.steps = self.choice.batches(size)
        """Mini-batches an epoch."""
        place = None if links is None else links.place
        self._here = place is None or (not place.replica and place.block == place.blocks - 1)
        self._replicas = 1 if place is None else place.replicas
        self._numbering = Numbering(self.choice)
        self._epoch = -1
        self._told: dict[int, Tensor] = {}
        """This epoch's, as far as all ranks have asked for them."""
        self._next = 0
        """The step of the first mini-batch that has never been asked for."""
        self._open: deque[tuple[int, Tensor]] = deque()
        """Mini-batches whose losses have not come, by their step: those of the coming report."""
        self._late: deque[tuple[int, Tensor, Tensor]] = deque()
        """Those whose losses the sampler may not know yet."""
        self._fault = ""
        """Why it cannot go on, which the next choice says to all ranks."""

    def ids(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        """Numbers (size,), int64, of the samples of an epoch's mini-batches; all ranks call it.

        A sample that is taken again has another number each time: see `Data`.
        """
        if not self.choice.repeats:
            return [self.choice.choose(epoch, i * self.size, self.size) for i in numbers]
        if epoch != self._epoch:
            self._epoch, self._told = epoch, {}
        asked = [i for i in numbers if i not in self._told]
        if asked:
            found = self._agreed(epoch, asked) if self.learns else self._each(epoch, asked)
            self._told |= dict(zip(asked, found, strict=True))
        return [self._told[i] for i in numbers]

    def _agreed(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        """What the rank chooses where the sampler lives, which all are told of."""
        found = self._chosen(epoch, numbers) if self._here else None
        if self.links is not None:
            found = self.links.agree(found)[-1]
        if isinstance(found, str):
            raise AgreedError(found)
        assert found is not None
        return found

    def _each(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        return [self._choose(epoch, i) for i in numbers]

    def _chosen(self, epoch: int, numbers: Sequence[int]) -> list[Tensor] | str:
        """The choice, or why there is none."""
        try:
            return self._each(epoch, numbers)
        except (ValueError, OSError) as error:
            return one_line(error)

    def _choose(self, epoch: int, number: int) -> Tensor:
        first = number * self.size
        if self.learns:
            ids = self._learned(epoch, number)
        else:
            ids = self.choice.choose(epoch, first, self.size)
        return self._numbering.numbered(epoch, first, ids)

    def _learned(self, epoch: int, number: int) -> Tensor:
        assert isinstance(self.sampler, Learning)
        step = epoch * self.steps + number
        known = step - self.sampler.lag
        while self._late and self._late[0][0] <= known:
            _, ids, losses = self._late.popleft()
            self.choice.learn(ids, losses)
        if self._fault:
            raise ValueError(self._fault)
        ids = self.choice.choose(epoch, number * self.size, self.size)
        if step >= self._next:
            self._next = step + 1
            self._open.append((step, ids))
        return ids

    def hear(self, losses: Sequence[Sequence[Tensor]]) -> None:
        """Losses (N,) of every replica's last block, in order, of all that was asked for since."""
        if not self.learns or not self._here:
            return
        shares = [ids.tensor_split(self._replicas) for _, ids in self._open]
        expected = [sum(len(own[r]) for own in shares) for r in range(self._replicas)]
        heard = [torch.cat([torch.empty(0), *found]) for found in losses]
        if [len(found) for found in heard] != expected:
            self._fault = (
                f"sampler {self.sampler.name!r} was told {sum(map(len, heard))} losses of "
                f"{sum(expected)} samples: take a solver that tells the loss of every one, or "
                "sampler.name=uniform"
            )
            return
        for own, (step, ids) in zip(shares, self._open, strict=True):
            taken = [found[: len(part)] for found, part in zip(heard, own, strict=True)]
            heard = [found[len(part) :] for found, part in zip(heard, own, strict=True)]
            self._late.append((step, ids, torch.cat(taken)))
        self._open.clear()

    def report(self) -> dict[str, Any]:
        """What the sampler says of the epoch, the same on every rank; all ranks call it."""
        if not self.learns or self.links is None:
            return {}
        return dict(self.links.agree(self.choice.report())[-1])

    def state(self) -> State:
        if not self._here:
            return State()
        kept = self.choice.state()
        if self.learns:
            late = [(f"late {step:012d}", ids, losses) for step, ids, losses in self._late]
            kept.block |= {f"{name} ids": ids for name, ids, _ in late}
            kept.block |= {f"{name} losses": losses for name, _, losses in late}
            kept.block["next"] = torch.tensor(self._next)
        return kept

    def load_state(self, state: State) -> None:
        self._epoch, self._told = -1, {}
        self.choice.load_state(state)
        if not self.learns or not self._here or "next" not in state.block:
            return
        self._next = int(check_kept("next", state.block["next"], torch.int64, ()))
        kept = {name: tensor.cpu() for name, tensor in entries(state.block, "late ").items()}
        steps = sorted({name.split()[0] for name in kept})
        self._open.clear()
        for n in steps:
            check_kept(f"ids of step {n}", kept[f"{n} ids"], torch.int64, (self.size,))
            losses = kept[f"{n} losses"]
            kind = losses.dtype if losses.is_floating_point() else torch.float32
            check_kept(f"losses of step {n}", losses, kind, (self.size,))
        self._late = deque((int(n), kept[f"{n} ids"], kept[f"{n} losses"]) for n in steps)
