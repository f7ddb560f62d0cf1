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
from hybrid.samplers.base import Learning, Sampler
from solvers.state import State, Tensors, entries


class Chosen:
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
        self._epoch = -1
        self._told: dict[int, Tensor] = {}
        """This epoch's, as far as all ranks have asked for them."""
        self._next = 0
        """The step of the first mini-batch that has never been asked for."""
        self._open: deque[tuple[int, Tensor]] = deque()
        """Mini-batches whose losses have not come, by their step."""
        self._late: deque[tuple[int, Tensor, Tensor]] = deque()
        """Those whose losses the sampler may not know yet."""
        self._heard: list[Tensor] = [torch.empty(0)] * self._replicas
        """Of each replica: losses that make no mini-batch yet."""

    def ids(self, epoch: int, numbers: Sequence[int]) -> list[Tensor]:
        """Ids (size,), int64, of mini-batches of an epoch; all ranks call it."""
        if not self.learns:
            return [self.choice.choose(epoch, i * self.size, self.size) for i in numbers]
        if epoch != self._epoch:
            self._epoch, self._told = epoch, {}
        asked = [i for i in numbers if i not in self._told]
        if asked:
            found = self._chosen(epoch, asked) if self._here else None
            if self.links is not None:
                found = self.links.agree(found)[-1]
            if isinstance(found, str):
                raise AgreedError(found)
            assert found is not None
            self._told |= dict(zip(asked, found, strict=True))
        return [self._told[i] for i in numbers]

    def _chosen(self, epoch: int, numbers: Sequence[int]) -> list[Tensor] | str:
        """The choice, or why there is none."""
        try:
            return [self._choose(epoch, i) for i in numbers]
        except (ValueError, OSError) as error:
            return one_line(error)

    def _choose(self, epoch: int, number: int) -> Tensor:
        assert isinstance(self.sampler, Learning)
        step = epoch * self.steps + number
        known = step - self.sampler.lag
        while self._late and self._late[0][0] <= known:
            _, ids, losses = self._late.popleft()
            self.choice.learn(ids, losses)
        if self._open and self._open[0][0] <= known:
            raise ValueError(
                f"sampler {self.sampler.name!r} is to choose mini-batch {step}, and the losses of "
                f"mini-batch {self._open[0][0]} have not come: set a larger sampler.lag than "
                f"{self.sampler.lag}, or take a solver that tells the loss of every mini-batch"
            )
        ids = self.choice.choose(epoch, number * self.size, self.size)
        if step >= self._next:
            self._next = step + 1
            self._open.append((step, ids))
        return ids

    def hear(self, losses: Sequence[Sequence[Tensor]]) -> None:
        """Losses (N,) of every replica's last block, in the order of their mini-batches."""
        if not self.learns or not self._here:
            return
        for r, found in enumerate(losses):
            self._heard[r] = torch.cat([self._heard[r], *found])
        while self._open:
            step, ids = self._open[0]
            sizes = [len(share) for share in ids.tensor_split(self._replicas)]
            if any(len(mine) < n for mine, n in zip(self._heard, sizes, strict=True)):
                break
            self._open.popleft()
            whole = torch.cat([mine[:n] for mine, n in zip(self._heard, sizes, strict=True)])
            self._heard = [mine[n:] for mine, n in zip(self._heard, sizes, strict=True)]
            self._late.append((step, ids, whole))

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
            kept.block |= _indexed("open", self._open) | _indexed("late", self._late)
            kept.block |= {f"heard {r}": mine for r, mine in enumerate(self._heard)}
            kept.block["next"] = torch.tensor(self._next)
        return kept

    def load_state(self, state: State) -> None:
        self._epoch, self._told = -1, {}
        self.choice.load_state(state)
        if not self.learns or not self._here or "next" not in state.block:
            return
        self._next = int(state.block["next"])
        kept = {name: tensor.cpu() for name, tensor in state.block.items()}
        self._open = deque((step, ids) for step, (ids,) in _steps(kept, "open"))
        self._late = deque((step, ids, losses) for step, (ids, losses) in _steps(kept, "late"))
        heard = entries(kept, "heard ")
        if len(heard) == self._replicas:
            self._heard = list(heard.values())


def _indexed(name: str, rows: deque[Any]) -> Tensors:
    """Tensors of rows (step, tensor, ...), by what they are."""
    return {
        f"{name} {step:012d} {i}": tensor
        for step, *tensors in rows
        for i, tensor in enumerate(tensors)
    }


def _steps(kept: Tensors, name: str) -> list[tuple[int, list[Tensor]]]:
    """The rows that `_indexed` made tensors of."""
    found: dict[int, list[Tensor]] = {}
    for key, tensor in entries(kept, f"{name} ").items():
        found.setdefault(int(key.split()[0]), []).append(tensor)
    return list(found.items())
