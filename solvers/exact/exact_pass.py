"""The exact forward-backward pass over blocks, pipelined over micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybrid.solvers.acting import Acts, Count, CountOrZero, NotNegative, Settings
from hybrid.solvers.base import Program, Recorder
from hybrid.solvers.block import Block
from hybrid.solvers.exact.pipeline import (
    Kind,
    MicroBatch,
    Wire,
    WireFormat,
    pass_order,
    split_into_micro_batches,
)
from hybrid.solvers.numerics.buffers import captured_buffers, frozen_statistics, replaced_buffers
from hybrid.solvers.state import Tensors
from hybrid.solvers.windows import Batch, PhaseStats, Record, Window

UNUSED = "leave it out, or give an exact solver its own setting of that name"
TRAINS = Acts(
    "there are serial corrections (rounds.correct_every, rounds.serial_epochs)",
    lambda run: run.setup.corrects,
    UNUSED,
)
PASSES = Acts(
    "there are serial corrections (rounds.correct_every, rounds.serial_epochs), or forward passes "
    "that start a window",
    lambda run: run.setup.corrects or run.solver.alternates,
    UNUSED,
)


@dataclass(frozen=True)
class PassSettings(Settings):
    """How an exact pass runs: as the solver `backprop`, and as other methods' correction."""

    acts: ClassVar[Mapping[str, Acts]] = {
        "correction.micro_batches": TRAINS,
        "correction.clip_norm": TRAINS,
        "correction.recompute": TRAINS,
        "correction.messages": PASSES,
        "correction.filter": PASSES,
    }

    micro_batches: CountOrZero = 0
    """m, micro-batches per mini-batch; with 1 a step is exact, bit for bit. 0: 1, or in a
    correction the solver's."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of the whole network's gradient; 0: no clipping."""
    recompute: bool = False
    """Gradient checkpointing: keep only block inputs and recompute; same bits."""
    messages: WireFormat = "float32"
    """Number format of messages between blocks."""
    filter: Count = 1
    """Send means over N x N squares of pixels; 1: every pixel."""

    def num_micro_batches(self, size: int, count: int) -> int:
        """Micro-batches per mini-batch of `size` samples on `count` blocks."""
        return min(self.micro_batches or 1, size)

    def lossless(self, formats: bool = False) -> PassSettings:
        """The same, with the whole gradient of the undivided network; `formats`: rounded as set."""
        plain: dict[str, Any] = {} if formats else {"messages": "float32", "filter": 1}
        return replace(self, clip_norm=0.0, **plain)


class ExactPass(Program):
    r"""Back-propagation over K blocks, pipelined over m micro-batches.

    Forward   lam_{k+1} = x_k = f_k(lam_k; w_k),   lam_0 the image
    Backward  p_k = (d x_k / d lam_k)^T p_{k+1},   p_K = d phi / d x_{K-1}
    Step      w_k <- optimizer step with the sum over micro-batches of (d x_k / d w_k)^T p_{k+1}

    With m = 1 it equals a plain training loop bit for bit, whatever K is. With m > 1 the
    micro-batches run in the one-forward-one-backward order (Narayanan et al., arXiv 2006.09503;
    drawn at `pipeline.pass_order`), so block k holds at most K - k graphs at once and is idle in
    K-1 of m+K-1 slots. BatchNorm then normalizes each micro-batch by its own statistics, and its
    running statistics are updated m times in each step: m > 1 is a different, equally valid
    training run.
    """

    solver: PassSettings

    def train(self, window: Window, recorder: Recorder | None = None) -> PhaseStats:
        """One exact step for each mini-batch, which `recorder` records."""
        stats = PhaseStats()
        with stats.timed(self.links):
            for rows, batch in window.recorded():
                self.train_step(batch, rows, recorder, stats)
            self.links.flush()
        return stats

    def train_step(
        self, batch: Batch, rows: slice, recorder: Recorder | None, stats: PhaseStats
    ) -> None:
        """Step on the exact gradient of one mini-batch."""
        self.gradient(batch, rows, recorder, stats, is_final=type(self).step is ExactPass.step)
        self.step(batch)

    def gradient(
        self,
        batch: Batch,
        rows: slice,
        recorder: Recorder | None,
        stats: PhaseStats,
        is_final: bool = False,
    ) -> None:
        """Leave the exact gradient of the batch-mean loss in the parameters.

        `is_final`: whether a step follows on this gradient as it is, so that replicas may add up
        parts of it while the last backward pass is under way.
        """
        block = self.block
        passes = MicroBatchPasses(self, batch, stats)
        for op in pass_order(block.index, block.count, passes.count):
            if op.kind is Kind.FORWARD:
                passes.forward()
            else:
                ends = is_final and passes.left == 1
                with block.last_pass("exact") if ends else nullcontext():
                    passes.backward(recorder, rows.start)
        passes.count_batch()

    def step(self, batch: Batch) -> None:
        """Step on the exact gradient at hand."""
        self.block.step("exact", batch.learning_rate, self.solver.clip_norm, self.links)

    def observe(self, window: Window, recorder: Recorder) -> PhaseStats:
        """Record an exact pass over the window; weights and statistics stay as they are."""
        stats = PhaseStats()
        with stats.timed(self.links), frozen_statistics(self.block.module):
            for rows, batch in window.recorded():
                self.gradient(batch, rows, recorder, stats)
                self.block.module.zero_grad(set_to_none=True)
            self.links.flush()
        return stats

    def propagate(self, window: Window, recorder: Recorder | None = None) -> PhaseStats:
        """Record the activations of forward passes, which update BatchNorm's statistics.

        A block whose input is a carried auxiliary variable starts from that.
        """
        block, links = self.block, self.links
        stats, wire = PhaseStats(), Wire(self.solver.messages, self.solver.filter)
        with stats.timed(links), torch.no_grad():
            for rows, batch in window.recorded():
                if block.first:
                    lam = batch.images()
                else:
                    lam = wire.receive(links.from_previous, block.formats[0])
                if recorder is not None:
                    carried = recorder.carried_input(rows)
                    lam = lam if carried is None else carried
                out = block.forward(lam, (0, batch.step, 0))
                if block.last:
                    labels = batch.labels()
                    weight = block.part_weight(batch, labels)
                    stats.classified(block.classify(out, labels, weight))
                else:
                    wire.send(links.to_next, out)
                if recorder is not None:
                    before, after = None if block.first else lam, None if block.last else out
                    recorder.record(Record(rows, lam=before, out=after))
                stats.samples += len(batch)
            links.flush()
        return stats


class MicroBatchPasses:
    """The forward and backward passes of one mini-batch's micro-batches through one block."""

    def __init__(self, program: ExactPass, batch: Batch, stats: PhaseStats) -> None:
        settings, self.block, self.links = program.solver, program.block, program.links
        self.batch, self.stats = batch, stats
        self.recompute = settings.recompute
        self.wire = Wire(settings.messages, settings.filter)
        self.waiting = deque(
            split_into_micro_batches(batch, settings.micro_batches or 1, self.block)
        )
        """Micro-batches before their forward pass."""
        self.count = self.left = len(self.waiting)
        """m, and the micro-batches before the end of their backward pass."""
        self.graphs: deque[tuple[MicroBatch, Tensor, Tensor]] = deque()
        self.captured: deque[Tensors] = deque()
        """Buffers as each forward pass found them: when it is run again, it gives the same."""
        self.losses: list[Tensor] = []

    def forward(self) -> None:
        """The next micro-batch: fetch lam_k, compute x_k or the loss, and send x_k up."""
        part, block = self.waiting.popleft(), self.block
        lam = part.images
        if lam is None:
            lam = self.wire.receive(self.links.from_previous, block.formats[0])
            lam = lam.detach().requires_grad_()
        out = self._recomputable(lam, part) if self.recompute else block.forward(lam, part.key)
        if part.labels is None:
            self.wire.send(self.links.to_next, out.detach())
        else:
            classified = block.classify(out, part.labels, part.weight)
            self.stats.scored(classified)
            if block.check is not None:
                block.check.take(part, lam, out, classified.loss)
            out = classified.loss * part.share
            self.losses.append(classified.loss.detach() * part.own_share)
        self.graphs.append((part, lam, out))

    def backward(self, recorder: Recorder | None, row: int) -> None:
        """The oldest micro-batch: fetch p_{k+1}, add its gradient, send p_k down, and record it.

        Its mini-batch begins at that row of the records.
        """
        part, lam, out = self.graphs.popleft()
        block, p_out, p_in = self.block, None, None
        if not block.last:
            dtype = out.dtype if block.scaler is None else torch.float32
            p_out = self.wire.receive_adjoint(self.links.from_next, dtype, part.size)
        buffers = self.captured.popleft() if self.recompute else {}
        with replaced_buffers(block.module, buffers) if self.recompute else nullcontext():
            block.backward(out, p_out, key=part.key)
        if not block.first:
            p_in = block.input_adjoint(lam)
            self.wire.send_adjoint(self.links.to_previous, p_in, part.size)
        self.left -= 1
        if recorder is not None:
            rows = slice(row + part.start, row + part.stop)
            recorder.record(record_of(block, rows, part.size, lam, out, p_in, p_out))

    def _recomputable(self, lam: Tensor, part: MicroBatch) -> Tensor:
        """x_k without its graph, which the backward pass makes from lam_k."""
        with captured_buffers(self.block.module, norms=True) as buffers:
            out: Tensor = checkpoint(self.block.forward, lam, part.key, use_reentrant=False)
        for earlier in self.captured:  # what this pass changed, they found unchanged
            earlier.update(buffers | earlier)
        self.captured.append(buffers)
        return out

    def count_batch(self) -> None:
        """Count the mini-batch, all of whose passes have ended."""
        self.stats.samples += len(self.batch)
        self.stats.steps += 1
        if self.losses:
            self.stats.losses.append(torch.stack(self.losses).sum())


def record_of(
    block: Block,
    rows: slice,
    size: int,
    lam: Tensor,
    out: Tensor,
    p_in: Tensor | None,
    p_out: Tensor | None,
) -> Record:
    """What a pass over a part of a mini-batch of `size` samples leaves at a block's cuts."""

    def a_sample(p: Tensor | None) -> Tensor | None:
        return None if p is None else block.stored_adjoint(p * size)

    return Record(
        rows,
        lam=None if block.first else lam.detach(),
        p_in=a_sample(p_in),
        out=None if block.last else out.detach(),
        p_out=a_sample(p_out),
    )
