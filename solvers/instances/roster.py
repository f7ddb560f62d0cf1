"""The instances since the last drain, and messages that came before they were needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid.solvers.base import Links
from hybrid.solvers.blocks.block import Block
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.instances.paths import Path, Paths
from hybrid.solvers.state import Tensors, entries
from hybrid.solvers.windows import Batch

Message = tuple[Tensor, ...]
"""As it is on the wire."""


class Roster:
    """All instances by number, as one rank knows them."""

    def __init__(self, block: Block, labeled: bool) -> None:
        self.block, self.index, self.labeled = block, block.index, labeled
        self.drawn: list[tuple[int, int]] = []
        """The step of each, and its first sample: what its path is drawn for."""
        self.paths: list[Path] = []
        self.waiting: dict[int, tuple[MicroBatch, float]] = {}
        """Those whose forward pass over this block is yet to come, and their learning rates."""

    def add_batch(self, batch: Batch, parts: int, paths: Paths) -> None:
        """Number a mini-batch's instances, and draw their paths."""
        ids, start = batch.ids.tensor_split(parts), 0
        labels: Sequence[Tensor | None] = [None] * len(ids)
        weights: Sequence[Tensor | None] = labels
        if self.labeled:
            targets, sizes = batch.labels(), [len(own) for own in ids]
            labels, weights = targets.split(sizes), self.block.part_weights(batch, targets, sizes)
        for number, (own, y, w) in enumerate(zip(ids, labels, weights, strict=True)):
            self.drawn.append((batch.step, int(own[0])))
            self.paths.append(paths.of(*self.drawn[-1]))
            size = start, start + len(own), batch.size, len(batch)
            part = MicroBatch(batch.step, number, *size, None, y, w)
            if self.paths[-1].last >= self.index:
                self.waiting[len(self.paths) - 1] = part, batch.learning_rate
            start += len(own)

    def redraw(self, paths: Paths) -> None:
        """Draw the paths of the instances that a checkpoint held."""
        self.paths = [paths.of(step, first) for step, first in self.drawn]

    def path_lengths(self, first: int = 0) -> list[tuple[int, ...]]:
        """Units in each block of the instances from number `first` on."""
        return [path.lengths for path in self.paths[first:]]

    def ends_here(self, item: int) -> bool:
        """Whether the instance goes no further than this block."""
        return self.paths[item].last <= self.index

    def state(self) -> Tensors:
        """For a checkpoint."""
        found = {"drawn": torch.tensor(self.drawn)}
        for item, (part, rate) in self.waiting.items():
            found[f"waits {item:09d}.part"] = torch.tensor(part[:6])
            found[f"waits {item:09d}.rate"] = float64_rows([[rate]])
            if part.labels is not None:
                found[f"waits {item:09d}.y"] = part.labels
            if part.weight is not None:
                found[f"waits {item:09d}.weight"] = part.weight
        return found

    def load_state(self, found: Tensors) -> None:
        """Take back what `state` gave."""
        self.drawn = [(step, first) for step, first in found["drawn"].tolist()]
        waits = entries(found, "waits ")
        for name in [n.removesuffix(".part") for n in waits if n.endswith(".part")]:
            numbers, labels = waits[f"{name}.part"].tolist(), waits.get(f"{name}.y")
            weight = waits.get(f"{name}.weight")
            part = MicroBatch(*numbers)._replace(labels=labels, weight=weight)
            self.waiting[int(name)] = part, float(waits[f"{name}.rate"])


class Mailbox:
    """Messages of one neighbor, which arrive in its order and are needed in this rank's."""

    def __init__(self, links: Links, above: bool, tensors: int) -> None:
        self._receive_tensor = links.from_next if above else links.from_previous
        self._name = f"early {'above' if above else 'below'} "
        self._tensors = tensors
        self._coming: deque[int] = deque()
        self._early: dict[int, Message] = {}

    def expect(self, items: Iterable[int]) -> None:
        """The instances whose messages come next."""
        self._coming.extend(items)

    def message(self, item: int) -> Callable[[], Tensor]:
        """Gives the tensors of an instance's message, one at each call."""
        while item not in self._early:
            self._receive()
        return partial(next, iter(self._early.pop(item)))

    def state(self) -> Tensors:
        """For a checkpoint: all messages on their way, which are received first."""
        while self._coming:
            self._receive()
        return {
            f"{self._name}{item:09d} {j}": part
            for item, parts in self._early.items()
            for j, part in enumerate(parts)
        }

    def load_state(self, found: Tensors) -> None:
        """Take back what `state` gave."""
        for name, tensor in entries(found, self._name).items():
            item = int(name.partition(" ")[0])
            self._early[item] = (*self._early.get(item, ()), tensor)

    def _receive(self) -> None:
        tensors = tuple(self._receive_tensor() for _ in range(self._tensors))
        self._early[self._coming.popleft()] = tensors


def float64_rows(rows: Iterable[Sequence[float]]) -> Tensor:
    """Numbers in float64, which holds integers exactly."""
    return torch.tensor([*rows], dtype=torch.float64)
