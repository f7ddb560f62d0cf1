"""Mini-batches and their windows, what is recorded of them, and what a phase did with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Rows = slice | Tensor
"""Which samples of a window: a slice in recorded order, or an int64 index."""
Seen = tuple[Tensor, ...]
"""The tensors of a network's output, and its targets in one tensor."""


class Source(Protocol):
    """Where mini-batches come from: inputs for the first block, targets for the last."""

    @property
    def mixes(self) -> bool:
        """Whether a part of a mini-batch is to be taken from the whole."""
        ...

    def images(self, ids: Tensor, step: int) -> Tensor:
        """Inputs (N, ...), such as images (N, C, H, W), augmented and normalized."""
        ...

    def labels(self, ids: Tensor, step: int) -> Tensor:
        """Targets (N, ...), such as classes (N,)."""
        ...


@dataclass(frozen=True)
class Batch:
    """One mini-batch: sample numbers (N,), and the number and learning rate of its step."""

    ids: Tensor
    learning_rate: float
    source: Source
    step: int = 0
    within: tuple[Tensor, Rows] | None = None
    """Of a part: the sample numbers of its mini-batch, and its samples' places there."""
    total: int = 0
    """Of one replica's share: samples of the mini-batch; 0: these are all of them."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> int:
        """N, samples of the mini-batch, over whose mean all replicas descend."""
        return self.total or len(self)

    @property
    def share(self) -> float:
        """This replica's part of that mean."""
        return len(self) / self.size

    def images(self) -> Tensor:
        """Inputs (N, ...); made anew at every call, so nobody need keep them."""
        return self._asked(self.source.images)

    def labels(self) -> Tensor:
        """Targets (N, ...)."""
        return self._asked(self.source.labels)

    def part(self, places: Rows) -> Batch:
        """Its samples in those places, whose mean is their own."""
        ids, mine = self.within or (self.ids, slice(None))
        places = places if self.within is None else torch.arange(len(ids))[mine][places]
        return replace(self, ids=ids[places], within=(ids, places), total=0)

    def of_replica(self, replica: int, replicas: int) -> Batch:
        """The share of one of `replicas`; shares differ by one sample at most."""
        if replicas == 1:
            return self
        sizes = [len(ids) for ids in self.ids.tensor_split(replicas)]
        start = sum(sizes[:replica])
        mine = self.part(slice(start, start + sizes[replica]))
        return replace(mine, total=len(self))

    def _asked(self, give: Callable[[Tensor, int], Tensor]) -> Tensor:
        if self.within is None or not self.source.mixes:
            return give(self.ids, self.step)
        ids, places = self.within
        return give(ids, self.step)[places]


@dataclass(frozen=True)
class Record:
    """What an exact pass saw at a block's two cuts; None where there is no cut, or no adjoint.

    Adjoints are in per-sample scale: the batch size times autograd's for the batch mean.
    """

    rows: slice
    """Which samples of the window."""
    lam: Tensor | None = None
    p_in: Tensor | None = None
    out: Tensor | None = None
    p_out: Tensor | None = None


@dataclass
class Window:
    """The mini-batches whose auxiliary variables live at once, as one rank sees them."""

    batches: list[Batch]
    sweeps: int = 1
    shuffle: Callable[[int], Tensor] | None = None
    """sweep -> permutation of the window's samples (per-sample storage); None: recorded order."""

    def recorded(self) -> Iterator[tuple[slice, Batch]]:
        """Rows and mini-batches as an exact pass meets them."""
        start = 0
        for batch in self.batches:
            yield slice(start, start + len(batch)), batch
            start += len(batch)

    def sweep(self, number: int) -> Iterator[tuple[Rows, Batch]]:
        """Rows and mini-batches of one sweep, the same on every rank."""
        if self.shuffle is None:
            yield from self.recorded()
            return
        ids = torch.cat([batch.ids for batch in self.batches])
        permutation = self.shuffle(number)
        for rows, batch in self.recorded():
            index = permutation[rows]
            yield index, replace(batch, ids=ids[index], within=None)


class Classified(NamedTuple):
    """What an output is worth beside the targets."""

    loss: Tensor
    """Mean over the samples, with its graph."""
    correct: Tensor | None
    """Sum of the metric over the samples: of accuracy the number of right answers."""
    each: Tensor | None = None
    """Loss of each sample, (N,), if somebody wants to know."""
    seen: Seen | None = None
    """What a metric that accumulates is to be shown of the mini-batch."""


@dataclass
class PhaseStats:
    """What one rank did in one phase; sums stay on the device until the phase has ended."""

    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each step; of the last block the training loss, else the coupling loss."""
    correct: list[Tensor] = field(default_factory=list)
    each: list[Tensor] = field(default_factory=list)
    """Losses (N,) of the samples, if somebody wants to know, in the order they were met."""
    seen: list[Seen] = field(default_factory=list)
    """What a metric that accumulates is to be shown."""
    squares: list[Tensor] = field(default_factory=list)
    """(||lam - x||^2, ||x||^2) of each step at the cut after this block."""
    exchanged: list[Tensor] = field(default_factory=list)
    """(||lam - x||^2, ||rho (lam - old lam)||^2) of each exchange at the cut before this block."""
    notices: list[str] = field(default_factory=list)
    """What a user should be told, the same on every rank."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Of how many gradients, by the updates of their weights since their forward pass."""

    def classified(self, found: Classified) -> None:
        """Count one mini-batch's loss and right answers."""
        self.losses.append(found.loss.detach())
        self.scored(found)

    def scored(self, found: Classified) -> None:
        """Count a sum of the metric, and the losses of the samples, where there are any."""
        if found.correct is not None:
            self.correct.append(found.correct)
        if found.each is not None:
            self.each.append(found.each)
        if found.seen is not None:
            self.seen.append(found.seen)

    def add(self, part: PhaseStats) -> None:
        """Take in what another part of the phase did."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(part, each.name))

    def residual(self) -> float:
        """Relative primal residual ||lam_{k+1} - x_k|| / ||x_k||; 0 without a measured cut."""
        if not self.squares:
            return 0.0
        r, x = torch.stack(self.squares).double().sum(0).tolist()
        return float((r / x) ** 0.5) if x > 0 else 0.0

    def residual_norms(self) -> tuple[float, float] | None:
        """Norms of the primal and the dual residual at the cut before this block, if exchanged.

        ||lam - x|| after the step of lam, and ||rho (lam - old lam)||, with rho = 2 beta (Boyd et
        al., Foundations and Trends in Machine Learning 2011, section 3.3).
        """
        if not self.exchanged:
            return None
        r, s = torch.stack(self.exchanged).double().sum(0).sqrt().tolist()
        return float(r), float(s)

    def per_step_losses(self) -> list[float]:
        """One loss a step."""
        return [float(x) for x in torch.stack(self.losses).tolist()] if self.losses else []

    @contextmanager
    def timed(self, now: Callable[[], float]) -> Iterator[None]:
        """Add the time of the body by the clock `now`, the work it left to a GPU included."""
        start = now()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.seconds += now() - start
