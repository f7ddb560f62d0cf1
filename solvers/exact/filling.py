"""Local steps in the gaps of a pipelined pass, in which a rank would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from hybrid.solvers.base import Recorder, SubProblems
from hybrid.solvers.block import Block
from hybrid.solvers.exact.exact_pass import ExactPass, MicroBatchPasses
from hybrid.solvers.exact.gaps import FillStep, Gaps
from hybrid.solvers.exact.pipeline import Kind, pass_order
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.numerics.clipping import clip_gradients, gradient_norms, total_norm
from hybrid.solvers.state import State, entries
from hybrid.solvers.windows import Batch, PhaseStats, Rows, Stopwatch

_RECORDS = "record "
"""Prefix of the records' names in a checkpoint."""


class BubbleFill:
    r"""Fills the gaps of one rank's passes with local steps on sub-problems recorded earlier.

    In pass t block k has time for the local loss of n_k samples (`pipeline.fit_gaps`), which come
    from the records of mini-batches t-1, t-2, ... in that order:

        g = exact gradient of mini-batch t at w_k
        l = mean over those n_k samples of the local loss's gradient, at the same w_k
        c = local_lr min(1, n_k / N), N the mini-batch's size: few samples are a noisy mean; of R
            replicas, whose shares differ by a sample, all take that of a share of N // R
        added   w_k <- optimizer step with g + c l
        own     w_k <- optimizer step with g, then one with l and learning rate c lr

    If there is time for a part of a mini-batch only, it is the first samples, so that with n_k < N
    samples of one mini-batch c l is local_lr (1/N) times the sum over them.

    Graphs of the pass are alive in the middle gap, so no weight changes before the pass has ended.
    The n_k are fixed before training, so the result does not depend on timing. At the end of an
    epoch the records are dropped.
    """

    def __init__(
        self,
        program: SubProblems,
        gaps: Gaps,
        samples: int,
        step: FillStep = "added",
    ) -> None:
        if step not in get_args(FillStep):
            choices = ", ".join(get_args(FillStep))
            raise ValueError(f"fill_step is {step!r}; choose one of {choices}")
        self.program, self.gaps, self.samples, self.kind = program, gaps, samples, step
        self.block: Block = program.block
        self.slots = stored_batches(gaps, samples)
        self.stats = PhaseStats()
        self.watch = Stopwatch()
        """The time of the local steps, which is part of the passes' time."""
        self.latest: Sequence[Batch] = ()
        """The epoch's mini-batches so far, newest first; needed to load records."""
        self.begin()

    def begin(self) -> None:
        """Forget the records, as at the start of an epoch."""
        self._history: deque[tuple[int, Batch]] = deque(maxlen=self.slots - 1)
        self._slot = 0
        self._sums: dict[Parameter, Tensor] = {}
        self._samples = 0

    def state(self) -> State:
        """The program's state and, within an epoch, the records."""
        state = self.program.state()
        if self._history:
            numbers = {"slot": torch.tensor(self._slot), "held": torch.tensor(len(self._history))}
            records = self.program.records() | numbers
            state.flight |= {_RECORDS + name: tensor for name, tensor in records.items()}
        return state

    def load_state(self, state: State) -> None:
        """Take back what `state` gave; the records are of the `latest` mini-batches."""
        self.program.load_state(state)
        records = entries(state.flight, _RECORDS)
        if not records:
            return
        self._slot = int(records.pop("slot"))
        # fewer than the epoch's mini-batches, if records were dropped within it
        held = int(records.pop("held", self.slots - 1))
        self.program.load_records(records)
        self._history.clear()
        for age, batch in enumerate(self.latest[:held]):
            self._history.append(((self._slot - 1 - age) % self.slots, batch))

    def train_step(
        self,
        exact: ExactPass,
        batch: Batch,
        rows: slice,
        recorder: Recorder | None,
        stats: PhaseStats,
    ) -> None:
        """A step of `exact` on a mini-batch, with local work in the gaps of its passes.

        What `recorder` records begins at `rows`; this program's records begin at a row of its own.
        """
        block = self.block
        passes = MicroBatchPasses(exact, batch, stats)
        recorders: list[tuple[Recorder, int]] = [(self.program, self._slot * self.samples)]
        if recorder is not None:
            recorders.insert(0, (recorder, rows.start))
        for op in pass_order(block.index, block.count, passes.count, self.gaps):
            if op.kind is Kind.FORWARD:
                passes.forward()
            elif op.kind is Kind.BACKWARD:
                passes.backward(recorders)
            else:
                with self.watch.timing(exact.links):
                    self.work(op.kind)
        passes.count_batch()
        self.step(batch, partial(exact.step, batch))

    def work(self, kind: Kind) -> None:
        """Add up the local gradients of the samples for this gap: MIDDLE or TURN."""
        middle, turn = self.gaps
        start, stop = (0, middle) if kind is Kind.MIDDLE else (middle, middle + turn)
        for age, (slot, batch) in enumerate(self._history):
            first = max(start - age * self.samples, 0)
            last = min(stop - age * self.samples, self.samples)
            if first < last:
                row = slot * self.samples
                rows = slice(row + first, row + last)
                self._add_gradient(batch.part(slice(first, last)), rows, first)

    def step(self, batch: Batch, exact_step: Callable[[], None]) -> None:
        """Step on the exact gradient at hand and on the local one; the record is then complete."""
        share = self.program.local_lr * self._filled_share(batch)
        # the step that it becomes part of is itself smaller after a roll-back
        rates = self.block.rates
        added = share * batch.share * rates["local"] / rates["exact"]
        local = self._local_gradient()
        if local is None:
            exact_step()
        elif self.kind == "added":
            for p, gradient in local.items():
                if p.grad is not None:
                    p.grad.add_(gradient, alpha=added)
            exact_step()
        else:
            exact_step()
            if batch.share != 1:
                torch._foreach_mul_(list(local.values()), batch.share)
            for p in self.block.module.parameters():
                p.grad = local.get(p)
            self.block.step("local", batch.learning_rate * share)
        self._history.appendleft((self._slot, batch))
        self._slot = (self._slot + 1) % self.slots

    def _filled_share(self, batch: Batch) -> float:
        """min(1, n_k / N): a learning rate, so it may not depend on the replica's own share."""
        samples = batch.size // self.program.setup.replicas
        done = min(sum(self.gaps), len(self._history) * samples)
        return min(1.0, done / samples)

    def _add_gradient(self, batch: Batch, rows: Rows, visit: int) -> None:
        exact = [(p, p.grad) for p in self.block.module.parameters()]
        self.block.module.zero_grad(set_to_none=True)
        with frozen_statistics(self.block.module):
            self.program.gradient(batch, rows, False, self.stats, visit)
        for p, before in exact:
            if p.grad is not None:
                gradient = p.grad.mul_(len(batch))
                self._sums[p] = self._sums[p].add_(gradient) if p in self._sums else gradient
            p.grad = before
        self._samples += len(batch)

    def _local_gradient(self) -> dict[Parameter, Tensor] | None:
        if not self._samples:
            return None
        mean, self._sums = self._sums, {}
        present = [mean[p] for p in self.block.module.parameters() if p in mean]
        if present:
            torch._foreach_mul_(present, 1 / self._samples)
        self._samples = 0
        if self.program.clip_norm:
            norm = total_norm(gradient_norms(present, self.block.device), None)
            clip_gradients(present, self.program.clip_norm, norm)
        return mean


def stored_batches(gaps: Gaps, samples: int) -> int:
    """Mini-batches in the store: those that the gaps use, and the one being recorded."""
    return ceil(sum(gaps) / samples) + 1
