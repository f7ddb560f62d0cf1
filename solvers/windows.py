"""Mini-batches, their windows, the records of exact passes, and the statistics of a phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Clock(Protocol):
    """The clock of links."""

    clocked: bool
    """Whether `now` counts work, not wall time."""

    def now(self) -> float: ...


@dataclass
class Stopwatch:
    """Adds up the time of pieces of work; on a GPU by events, which never stop the host."""

    counted: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Starts and ends of a GPU's work that have not been read."""

    def __add__(self, other: Stopwatch) -> Stopwatch:
        return Stopwatch(self.counted + other.counted, self.events + other.events)

    @contextmanager
    def timing(self, clock: Clock) -> Iterator[None]:
        """Count the body's time by this clock or, where it counts wall time, by the GPU's."""
        if torch.cuda.is_initialized() and not clock.clocked:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self.events.append((first, last))
        else:
            start = clock.now()
            yield
            self.counted += clock.now() - start

    def seconds(self) -> float:
        """Seconds so far; waits until a GPU has done the measured work."""
        for first, last in self.events:
            last.synchronize()
            self.counted += first.elapsed_time(last) / 1e3
        self.events = []
        return self.counted


Rows = slice | Tensor
"""Which samples of a window: a slice in recorded order, or an int64 index."""


def on_its_way(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, to which it is copied while the host goes on.

    The host prepares the next mini-batch while a GPU computes, since no step reads a tensor: pinned
    memory, from which the GPU copies by itself, is all that a prefetch needs.
    """
    on_host = device.type == "cuda" and not x.is_cuda
    return (x.pin_memory() if on_host else x).to(device, non_blocking=True)


def rows_of(tensor: Tensor, rows: Rows) -> Rows:
    """Rows as an index into a tensor, on its device."""
    return rows if isinstance(rows, slice) else on_its_way(rows, tensor.device)


class Source(Protocol):
    """Where mini-batches come from: inputs for the first block, targets for the last."""

    @property
    def mixes(self) -> bool:
        """Whether a sample depends on the others of its mini-batch: replicas need the whole."""
        ...

    @property
    def joint(self) -> bool:
        """Whether samples are made all at once: parts are taken from a replica's share."""
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
    """For a part: the sample numbers of its mini-batch, or of a replica's share of it, and its
    samples' places there."""
    total: int = 0
    """For one replica's share: samples of the mini-batch; 0: these are all of them."""
    whole: Batch | None = None
    """For a part: the mini-batch, or the replica's share of one, that it is taken from."""
    weight: Tensor | None = None
    """The weight of each of its samples in the mini-batch's loss, if it is known."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> int:
        """N, the samples of the mini-batch on all replicas."""
        return self.total or len(self)

    @property
    def share(self) -> float:
        """The share of these samples in the mini-batch."""
        return len(self) / self.size

    def images(self) -> Tensor:
        """Inputs (N, ...), computed at every call, so they need not be stored."""
        return self._of_source(self.source.images)

    def labels(self) -> Tensor:
        """Targets (N, ...)."""
        return self._of_source(self.source.labels)

    def part(self, places: Rows) -> Batch:
        """The samples in those places as a separate mini-batch."""
        ids, rows = self.within or (self.ids, slice(None))
        places = places if self.within is None else torch.arange(len(ids))[rows][places]
        whole = self.whole or self
        return replace(self, ids=ids[places], within=(ids, places), total=0, whole=whole)

    def of_replica(self, replica: int, replicas: int) -> Batch:
        """The share of one replica; shares differ by at most one sample."""
        if replicas == 1:
            return self
        if not self.source.mixes:
            return replace(self, ids=self.ids.tensor_split(replicas)[replica], total=len(self))
        sizes = [len(ids) for ids in self.ids.tensor_split(replicas)]
        start = sum(sizes[:replica])
        part = self.part(slice(start, start + sizes[replica]))
        return replace(part, total=len(self), whole=None)

    def _of_source(self, give: Callable[[Tensor, int], Tensor]) -> Tensor:
        if self.within is None or not (self.source.mixes or self.source.joint):
            return give(self.ids, self.step)
        ids, places = self.within
        given = give(ids, self.step)
        return given[rows_of(given, places)]


@dataclass(frozen=True)
class Record:
    """Activations and adjoints of an exact pass at a block's two cuts; None: there is none.

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
    """The mini-batches whose auxiliary variables exist at once, as one rank sees them."""

    batches: list[Batch]
    sweeps: int = 1
    shuffle: Callable[[int], Tensor] | None = None
    """sweep -> permutation of the window's samples (per-sample storage); None: recorded order."""

    def recorded(self) -> Iterator[tuple[slice, Batch]]:
        """Rows and mini-batches in the order of an exact pass."""
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


class LossAndMetric(NamedTuple):
    """Loss and metric of an output and its targets."""

    loss: Tensor
    """Mean over the samples, with its graph."""
    correct: Tensor | None
    """Sum of the metric over the samples; of the accuracy, the number of right answers."""
    each: Tensor | None = None
    """Loss of each sample, (N,), if a sampler needs it."""


@dataclass
class PhaseStats:
    """Statistics of one rank and phase; sums stay on the device until the phase has ended."""

    samples: int = 0
    steps: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)
    """The time of the phase."""
    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each step; in the last block the training loss, else the coupling loss."""
    correct: list[Tensor] = field(default_factory=list)
    each: list[Tensor] = field(default_factory=list)
    """Losses (N,) of the samples in the order of training, if a sampler needs them."""
    squares: list[Tensor] = field(default_factory=list)
    """(||lam - x||^2, ||x||^2) of each step at the cut after this block."""
    exchanged: list[Tensor] = field(default_factory=list)
    """(||lam - x||^2, ||rho (lam - old lam)||^2) of each exchange at the cut before this block."""
    notices: list[str] = field(default_factory=list)
    """Messages for the user, the same on every rank."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by the updates of their weights since their forward pass."""

    def count_loss(self, result: LossAndMetric) -> None:
        """Count one mini-batch's loss and metric."""
        self.losses.append(result.loss.detach())
        self.count_metric(result)

    def count_metric(self, result: LossAndMetric) -> None:
        """Count the metric, and the losses of the samples, if there are any."""
        if result.correct is not None:
            self.correct.append(result.correct)
        if result.each is not None:
            self.each.append(result.each)

    def add(self, part: PhaseStats) -> None:
        """Add the statistics of another part of the phase."""
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
        """The loss of each step."""
        return [float(x) for x in torch.stack(self.losses).tolist()] if self.losses else []

    @contextmanager
    def timed(self, clock: Clock) -> Iterator[None]:
        """Add the time of the body, including the work that it left to a GPU."""
        watch = Stopwatch()
        with watch.timing(clock):
            yield
        self.watch += watch
