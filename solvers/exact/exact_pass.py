"""Exact back-propagation through the blocks, pipelined in micro-batches."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch

from hybrid.solvers.acting import SEVERAL_BLOCKS, Acts, CountOrZero, NotNegative
from hybrid.solvers.base import Recorder, Solver
from hybrid.solvers.block import Block
from hybrid.solvers.engine.engine import Engine, Scheduled
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.policies import BackwardPolicy, KeepGraph, Recompute
from hybrid.solvers.engine.schedule import Action, Span, flushed
from hybrid.solvers.layers.bundle import Crossing, packed
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.micro_batches import MicroBatch, record_of
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.windows import Batch, PhaseStats, Record, Window
from hybrid.solvers.wire import Adjoints, Messages, Wire, comparable

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
class PassSettings(Scheduled):
    """How an exact pass runs: as the solver `backprop`, and as other methods' correction."""

    acts: ClassVar[Mapping[str, Acts]] = {
        "correction.micro_batches": TRAINS,
        "correction.clip_norm": TRAINS,
        "correction.recompute": TRAINS,
        "correction.messages": PASSES,
        "correction.adjoints": TRAINS,
    }

    micro_batches: CountOrZero = 0
    """m, micro-batches per mini-batch; with 1 a step is exact, bit for bit. 0: 1, or in a
    correction the solver's."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of the whole network's gradient; 0: no clipping."""
    recompute: Annotated[bool, SEVERAL_BLOCKS] = False
    """Gradient checkpointing: keep only block inputs and recompute; same bits."""
    messages: Messages = "float32"
    """Codec of activations between blocks: float32, bfloat16, float16, int8, int6,
    int4 or int3."""
    adjoints: Adjoints = ""
    """Codec of their adjoints, which bear fewer bits; empty: that of `messages`."""

    def num_micro_batches(self, size: int, count: int) -> int:
        return min(self.micro_batches or 1, size)

    def lossless(self, formats: bool = False) -> "PassSettings":
        """The same, with the whole gradient of the undivided network; `formats`: rounded as set."""
        plain: dict[str, Any] = comparable(self.messages, self.adjoints, formats)
        return replace(self, clip_norm=0.0, **plain)

    def wire(self) -> Wire:
        return Wire(self.messages, self.adjoints)

    def schedule(
        self, index: int, count: int, span: Span, budget: LocalBudget | None = None
    ) -> list[Action]:
        return flushed(index, count, span)

    def policy(self, block: Block) -> BackwardPolicy:
        return Recompute(block) if self.recompute else KeepGraph(block)


class ExactPass(Engine):
    r"""Back-propagation over K blocks, pipelined over m micro-batches.

    Forward   lam_{k+1} = x_k = f_k(lam_k; w_k),   lam_0 the image
    Backward  p_k = (d x_k / d lam_k)^T p_{k+1},   p_K = d phi / d x_{K-1}
    Step      w_k <- optimizer step with the sum over micro-batches of (d x_k / d w_k)^T p_{k+1}

    With m = 1 it equals a plain training loop bit for bit, whatever K is. With m > 1 the
    micro-batches run in the one-forward-one-backward order (Narayanan et al., arXiv 2006.09503;
    drawn at `schedule.flushed`), so block k holds at most K - k graphs at once and is idle in
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
                self.gradient(batch, rows, recorder, stats, steps=True)
            self.links.flush()
        return stats

    def gradient(
        self,
        batch: Batch,
        rows: slice,
        recorder: Recorder | None,
        stats: PhaseStats,
        steps: bool = False,
    ) -> None:
        """Leave the exact gradient of the batch-mean loss in the parameters, or step on it."""
        keep = None if recorder is None else partial(self._record, recorder, rows.start)
        self.pass_over(batch, stats, keep, steps)
        self._ticks = 0

    def _record(self, recorder: Recorder, row: int, flight: Flight, p_in: Crossing | None) -> None:
        """Record a micro-batch, whose mini-batch begins at that row."""
        part = flight.part
        assert flight.lam is not None
        assert flight.out is not None
        rows = slice(row + part.start, row + part.stop)
        columns = self._columns(flight, flight.out, p_in)
        recorder.record(record_of(self.block, rows, part.size, *columns))

    def last_pass(self) -> AbstractContextManager[None]:
        """Replicas may add up parts of the gradient meanwhile, if the step is on it as it is."""
        as_it_is = type(self).step is ExactPass.step
        return self.block.last_pass("exact") if as_it_is else nullcontext()

    def step(self, part: MicroBatch) -> None:
        """Step on the exact gradient at hand."""
        self.block.step("exact", part.learning_rate, self.solver.clip_norm, self.links)

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
        stats, wire = PhaseStats(), self._wire
        with stats.timed(links), torch.no_grad():
            for rows, batch in window.recorded():
                if block.first:
                    lam = batch.images()
                else:
                    lam = wire.receive(links.from_previous, block.formats[0], self._below)
                if recorder is not None:
                    carried = recorder.carried_input(rows)
                    lam = lam if carried is None else carried
                out = block.forward(lam, (0, batch.step, 0), apart=True)
                if block.last:
                    labels = batch.labels()
                    weight = block.part_weight(batch, labels)
                    stats.count_loss(block.compute_loss(out, labels, weight))
                else:
                    wire.send(links.to_next, out, self._above)
                if recorder is not None:
                    before = None if block.first else packed(lam, self._below)
                    after = None if block.last else packed(out, self._above)
                    recorder.record(Record(rows, lam=before, out=after))
                stats.samples += len(batch)
            links.flush()
        return stats


@dataclass(frozen=True)
class Backprop(PassSettings, Solver):
    """Every mini-batch is one step on the gradient of the whole network.

    The mathematics is that of `ExactPass`. As the `correction` of another method it holds the
    settings of that pass.
    """

    name: ClassVar[str] = "backprop"
    exact: ClassVar[bool] = True
    cuts_inside: ClassVar[bool] = True

    def progress(self, count: int, size: int, optimizer: str = "sgd") -> float:
        return 1.0


Backprop.program = ExactPass
