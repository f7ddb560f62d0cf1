"""Local steps in the gaps of a pipelined pass, where a rank would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, get_args

import torch
from torch import Tensor

from solvers.base import Batch, Block, PhaseStats, Recorder, Rows
from solvers.blocks.clipping import clip_gradients, gradient_norms
from solvers.blocks.norms import frozen_statistics
from solvers.passes.pipeline import FillStep, Gaps, Op, records_needed


class SubProblems(Protocol):
    """What a solver must offer to fill gaps: a record, and the local loss's gradient."""

    local_lr: float
    clip_norm: float

    @property
    def recorder(self) -> Recorder: ...

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None: ...

    def records(self) -> dict[str, Tensor]: ...

    def load_records(self, records: dict[str, Tensor]) -> None: ...

    def gradient(
        self, block: Block, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats
    ) -> object: ...

    def cut_state(self) -> dict[str, Tensor]: ...

    def load_cut_state(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None: ...


class BubbleFill:
    r"""Fills the gaps of one rank's passes with local steps on sub-problems recorded earlier.

    In pass t block k has time for the local loss of n_k samples (`pipeline.fit`), taken from the
    records of mini-batches t-1, t-2, ... in that order:

        g = exact gradient of mini-batch t at w_k
        l = mean over those n_k samples of the local loss's gradient, at the same w_k
        c = local_lr min(1, n_k / N), N the mini-batch's size: few samples are a noisy mean
        added   w_k <- optimiser step with g + c l
        own     w_k <- optimiser step with g, then one with l and learning rate c lr

    Graphs of the pass are alive in the middle gap, so no weight changes before the pass has ended.
    Who works how much is fixed before training: the result does not depend on timing. The records
    end with an epoch.
    """

    def __init__(
        self,
        solver: SubProblems,
        block: Block,
        gaps: Gaps,
        samples: int,
        step: FillStep = "added",
    ) -> None:
        if step not in get_args(FillStep):
            raise ValueError(
                f"fill_step is {step!r}; choose one of {', '.join(get_args(FillStep))}"
            )
        self.solver, self.block, self.gaps, self.samples = solver, block, gaps, samples
        self.kind = step
        self.slots = records_needed([gaps], samples) + 1
        """Mini-batches in the store: those drawn on, and the one being recorded."""
        solver.prepare(block, self.slots * samples, exchanges=False)
        self.stats = PhaseStats()
        self.begin()

    def begin(self) -> None:
        """Forget the records, as at the start of an epoch."""
        self._history: deque[tuple[int, Batch]] = deque(maxlen=self.slots - 1)
        self._slot = 0
        self._sums: list[Tensor | None] = []
        self._samples = 0

    def state(self) -> dict[str, Tensor]:
        """The records, for a checkpoint in mid-epoch; empty if there are none."""
        if not self._history:
            return {}
        return {**self.solver.records(), "slot": torch.tensor(self._slot)}

    def load_state(self, state: dict[str, Tensor], batches: Sequence[Batch]) -> None:
        """Take back what `state` gave; `batches` are the latest mini-batches, newest first."""
        records = dict(state)
        self._slot = int(records.pop("slot"))
        self.solver.load_records(records)
        self._history.clear()
        for age, batch in enumerate(batches[: self.slots - 1]):
            self._history.append(((self._slot - 1 - age) % self.slots, batch))

    @property
    def recorder(self) -> Recorder:
        """Where the pass leaves its record, from row `next_row` on."""
        return self.solver.recorder

    @property
    def next_row(self) -> int:
        """First row of the mini-batch that is being recorded."""
        return self._slot * self.samples

    def work(self, op: Op) -> None:
        """Add up the local gradients of the middle's or the turn's share of the samples."""
        middle, turn = self.gaps
        start, stop = (0, middle) if op is Op.MIDDLE else (middle, middle + turn)
        for age, (slot, batch) in enumerate(self._history):
            first = max(start - age * self.samples, 0)
            last = min(stop - age * self.samples, self.samples)
            if first < last:
                part = Batch(batch.ids[first:last], batch.learning_rate, batch.source)
                self._add(part, slice(slot * self.samples + first, slot * self.samples + last))

    def step(self, batch: Batch) -> None:
        """Step on the exact gradient at hand and on the local one; the record becomes history."""
        share = self.solver.local_lr * min(1.0, self._samples / self.samples)
        local = self._local_gradient()
        if local is None:
            self.block.step("exact", batch.learning_rate)
        elif self.kind == "added":
            for p, gradient in zip(self._parameters(), local, strict=True):
                if p.grad is not None and gradient is not None:
                    p.grad.add_(gradient, alpha=share * self.block.rates["local"])
            self.block.step("exact", batch.learning_rate)
        else:
            self.block.step("exact", batch.learning_rate)
            for p, gradient in zip(self._parameters(), local, strict=True):
                p.grad = gradient
            self.block.step("local", batch.learning_rate * share)
        self._history.appendleft((self._slot, batch))
        self._slot = (self._slot + 1) % self.slots

    def _add(self, batch: Batch, rows: slice) -> None:
        exact = [p.grad for p in self._parameters()]
        self.block.module.zero_grad(set_to_none=True)
        with frozen_statistics(self.block.module):
            self.solver.gradient(self.block, batch, rows, False, self.stats)
        sums = self._sums or [None] * len(exact)
        for i, (p, before) in enumerate(zip(self._parameters(), exact, strict=True)):
            if p.grad is not None:
                mine = p.grad.mul_(len(batch))
                total = sums[i]
                sums[i] = mine if total is None else total.add_(mine)
            p.grad = before
        self._sums = sums
        self._samples += len(batch)

    def _local_gradient(self) -> list[Tensor | None] | None:
        if not self._samples:
            return None
        mean, self._sums = self._sums, []
        present = [g for g in mean if g is not None]
        if present:
            torch._foreach_mul_(present, 1 / self._samples)
        self._samples = 0
        if self.solver.clip_norm:
            clip_gradients(present, self.solver.clip_norm, gradient_norms(present))
        return mean

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self.block.module.parameters())
