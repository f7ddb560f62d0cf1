"""The exact forward-backward pass over blocks, pipelined over micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybrid.solvers.acting import Acts, Count, NotNegative, Settings
from hybrid.solvers.base import Program, Recorder
from hybrid.solvers.blocks.buffers import captured_buffers, frozen_statistics, replaced_buffers
from hybrid.solvers.exact.filling import BubbleFill
from hybrid.solvers.exact.micro_batches import MicroBatch, split_into_micro_batches
from hybrid.solvers.exact.pipeline import Op, pass_order
from hybrid.solvers.exact.wire import Wire, WireFormat
from hybrid.solvers.state import Tensors
from hybrid.solvers.windows import Batch, PhaseStats, Record, Window

UNUSED = "leave it out, or give an exact solver its own setting of that name"
TRAINS = Acts(
    "there are serial corrections (rounds.correct_every, rounds.serial_epochs)",
    lambda run: run.setup.corrects or run.setup.fills,
    UNUSED,
)
PASSES = Acts(
    "there are serial corrections (rounds.correct_every, rounds.serial_epochs), or forward passes "
    "that start a window",
    lambda run: run.setup.corrects or run.setup.fills or run.solver.alternates,
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

    micro_batches: Count = 1
    """Parts of a mini-batch that are in the pipeline at once; 1 is exact, bit for bit."""
    clip_norm: NotNegative = 0.0
    """Largest norm of the whole network's gradient; 0: no clipping."""
    recompute: bool = False
    """Keep only block inputs, and run forward again before backward: less memory, same bits."""
    messages: WireFormat = "float32"
    """Number format of what crosses a cut: float32, bfloat16, float16 or int8."""
    filter: Count = 1
    """Side of the squares whose mean crosses a cut in place of their pixels; 1: every pixel."""


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

    A `BubbleFill` can use the idle slots for local steps.
    """

    solver: PassSettings

    def train(
        self, window: Window, recorder: Recorder | None = None, fill: BubbleFill | None = None
    ) -> PhaseStats:
        """One exact step for each mini-batch, which `recorder` records.

        `fill` computes local gradients in the gaps, and has a recorder of its own.
        """
        stats = PhaseStats()
        with stats.timed(self.links):
            for rows, batch in window.recorded():
                self.gradient(batch, rows, recorder, stats, fill)
                if fill is None:
                    self.step(batch)
                else:
                    fill.step(batch, lambda batch=batch: self.step(batch))  # type: ignore[misc]
            self.links.flush()
        return stats

    def observe(self, window: Window, recorder: Recorder) -> PhaseStats:
        """Record an exact pass over the window; weights and statistics stay as they are."""
        stats = PhaseStats()
        with stats.timed(self.links), frozen_statistics(self.block.module):
            for rows, batch in window.recorded():
                self.gradient(batch, rows, recorder, stats, steps=False)
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
                    lam = wire.receive(links.from_previous, block.dtype)
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

    def gradient(
        self,
        batch: Batch,
        rows: slice,
        recorder: Recorder | None,
        stats: PhaseStats,
        fill: BubbleFill | None = None,
        steps: bool = True,
    ) -> None:
        """Leave the exact gradient of the batch-mean loss in the parameters.

        `steps`: whether a step on it follows.
        """
        recorders: list[tuple[Callable[[Record], None], int]] = []
        if recorder is not None:
            recorders.append((recorder.record, rows.start))
        if fill is not None:
            recorders.append((fill.record, fill.next_row))
        plain = steps and fill is None and type(self).step is ExactPass.step
        run = _Pass(self, batch, recorders, plain)
        m, gaps = len(run.parts), None if fill is None else fill.gaps
        for op in pass_order(self.block.index, self.block.count, m, gaps):
            if op is Op.FORWARD:
                run.forward(stats)
            elif op is Op.BACKWARD:
                run.backward()
            else:
                assert fill is not None
                with fill.watch.timing(self.links):
                    fill.work(op)
        stats.samples += len(batch)
        stats.steps += 1
        if run.losses:
            stats.losses.append(torch.stack(run.losses).sum())

    def step(self, batch: Batch) -> None:
        """Step on the exact gradient at hand."""
        clip = self.solver.clip_norm
        self.block.step("exact", batch.learning_rate, clip, self.links)


class _Pass:
    """One mini-batch on its way through one block."""

    def __init__(
        self,
        program: ExactPass,
        batch: Batch,
        recorders: list[tuple[Callable[[Record], None], int]],
        plain: bool,
    ) -> None:
        settings, block = program.solver, program.block
        self.block, self.links, self.recorders = block, program.links, recorders
        self.recompute = settings.recompute
        self.wire = Wire(settings.messages, settings.filter)
        self.parts = split_into_micro_batches(batch, settings.micro_batches, block)
        self.graphs: deque[tuple[MicroBatch, Tensor, Tensor]] = deque()
        self.captured: deque[Tensors] = deque()
        """Buffers as each forward pass found them: when it is run again, it gives the same."""
        self.losses: list[Tensor] = []
        self.forwards = 0
        self.plain = plain
        """Whether the step is on this pass's gradient, unchanged."""

    def forward(self, stats: PhaseStats) -> None:
        part = self.parts[self.forwards]
        self.forwards += 1
        if part.images is not None:
            lam = part.images
        else:
            lam = self.wire.receive(self.links.from_previous, self.block.dtype)
            lam = lam.detach().requires_grad_()
        if self.recompute:
            with captured_buffers(self.block.module, norms=True) as buffers:
                out = checkpoint(self.block.forward, lam, part.key, use_reentrant=False)
            for earlier in self.captured:  # what this pass changed, they found unchanged
                earlier.update(buffers | earlier)
            self.captured.append(buffers)
        else:
            out = self.block.forward(lam, part.key)
        if part.labels is not None:
            found = self.block.classify(out, part.labels, part.weight)
            stats.scored(found)
            out = found.loss * part.share
            self.losses.append(found.loss.detach() * part.own_share)
        else:
            self.wire.send(self.links.to_next, out.detach())
        self.graphs.append((part, lam, out))

    def backward(self) -> None:
        part, lam, out = self.graphs.popleft()
        p_out = p_in = None
        if not self.block.last:
            dtype = out.dtype if self.block.scaler is None else torch.float32
            p_out = self.wire.receive_adjoint(self.links.from_next, dtype, part.size)
        ends = self.plain and not self.graphs and self.forwards == len(self.parts)
        with (
            replaced_buffers(self.block.module, self.captured.popleft())
            if self.recompute
            else nullcontext(),
            self.block.last_pass("exact") if ends else nullcontext(),
        ):
            self.block.backward(out, p_out, key=part.key)
        if not self.block.first:
            p_in = self.block.input_adjoint(lam)
            self.wire.send_adjoint(self.links.to_previous, p_in, part.size)
        for record, start in self.recorders:
            record(
                Record(
                    slice(start + part.start, start + part.stop),
                    lam=None if self.block.first else lam.detach(),
                    p_in=None if p_in is None else self.block.stored_adjoint(p_in * part.size),
                    out=None if self.block.last else out.detach(),
                    p_out=None if p_out is None else self.block.stored_adjoint(p_out * part.size),
                )
            )
