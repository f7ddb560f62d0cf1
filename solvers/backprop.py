"""Exact forward-backward through the links: serial training and the hybrid's correction pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from solvers.base import (
    Batch,
    Block,
    Links,
    PhaseStats,
    Recorder,
    Solver,
    Window,
)
from solvers.blocks.clipping import clip_gradients, gradient_norms
from solvers.blocks.norms import frozen_statistics
from solvers.passes.bubble import BubbleFill
from solvers.passes.pipeline import Op, order
from solvers.passes.wire import Wire, WireFormat


@dataclass
class Backprop(Solver):
    r"""Back-propagation over K blocks, pipelined over m micro-batches.

    Forward   lam_{k+1} = x_k = f_k(lam_k; w_k),   lam_0 the image
    Backward  p_k = (d x_k / d lam_k)^T p_{k+1},   p_K = d phi / d x_{K-1}
    Step      w_k <- optimiser step with the sum over micro-batches of (d x_k / d w_k)^T p_{k+1}

    With m = 1 it equals a plain training loop bit for bit, whatever K. With m > 1 the micro-batches
    run in the one-forward-one-backward order (Narayanan et al., arXiv 2006.09503; drawn at
    `pipeline.order`), so block k holds at most K - k graphs at once and idles for (K-1) of m+K-1
    slots. BatchNorm then normalises each micro-batch by its own statistics, and its running
    statistics are updated m times a step: m > 1 is a different, equally valid training run.

    The idle slots can take the local steps of a `BubbleFill`.
    """

    name: ClassVar[str] = "backprop"
    exact: ClassVar[bool] = True

    micro_batches: int = 1
    """Parts of a mini-batch that are in the pipeline at once; 1 is exact, bit for bit."""
    clip_norm: float = 0.0
    """Largest norm of the whole network's gradient; 0: no clipping."""
    recompute: bool = False
    """Keep only block inputs and run forward again before backward: less memory, same result."""
    messages: WireFormat = "float32"
    """Number format of what crosses a cut: float32, bfloat16, float16 or int8."""
    filter: int = 1
    """Side of the squares whose mean crosses a cut in place of their pixels; 1: every pixel."""

    def __post_init__(self) -> None:
        for name in ("micro_batches", "filter"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.clip_norm < 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be 0 (off) or positive")
        if self.messages not in get_args(WireFormat):
            choices = ", ".join(get_args(WireFormat))
            raise ValueError(f"messages is {self.messages!r}; choose one of {choices}")

    def train(
        self, block: Block, links: Links, window: Window, fill: BubbleFill | None = None
    ) -> PhaseStats:
        """One exact step a mini-batch, recorded where the window has a recorder.

        A `fill` works in the gaps, and records for itself.
        """
        stats = PhaseStats()
        with stats.timed(links):
            for rows, batch in window.recorded():
                self.gradient(block, links, batch, rows, window.recorder, stats, fill)
                self._clip(block, links)
                if fill is None:
                    block.step("exact", batch.learning_rate)
                else:
                    fill.step(batch)
            links.flush()
        return stats

    def observe(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Record an exact pass over the window without a step or a change of statistics."""
        stats = PhaseStats()
        with stats.timed(links), frozen_statistics(block.module):
            for rows, batch in window.recorded():
                self.gradient(block, links, batch, rows, window.recorder, stats)
                block.module.zero_grad(set_to_none=True)
            links.flush()
        return stats

    def propagate(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Forward only: record activations, without adjoints; BatchNorm's statistics move.

        A block with carried auxiliary variables at its input starts from them.
        """
        stats, wire = PhaseStats(), Wire(self.messages, self.filter)
        with stats.timed(links), torch.no_grad():
            for rows, batch in window.recorded():
                if block.first:
                    lam = batch.images()
                else:
                    lam = wire.receive(links.from_previous, block.dtype)
                if window.recorder is not None:
                    carried = window.recorder.carried_input(rows)
                    lam = lam if carried is None else carried
                out = block.forward(lam)
                if block.last:
                    labels = batch.labels()
                    stats.classified(out, labels)
                    stats.losses.append(block.loss(out, labels))
                else:
                    wire.send(links.to_next, out)
                if window.recorder is not None:
                    before, after = None if block.first else lam, None if block.last else out
                    window.recorder.record(rows, before, None, after, None)
                stats.samples += len(batch)
            links.flush()
        return stats

    def gradient(
        self,
        block: Block,
        links: Links,
        batch: Batch,
        rows: slice,
        recorder: Recorder | None,
        stats: PhaseStats,
        fill: BubbleFill | None = None,
    ) -> None:
        """Leave the exact gradient of the batch-mean loss in the parameters."""
        m = min(self.micro_batches, len(batch))
        recorders = [(recorder, rows.start)] if recorder is not None else []
        if fill is not None:
            recorders.append((fill.recorder, fill.next_row))
        run = _Pass(self, block, links, batch, m, recorders, stats)
        for op in order(block.index, block.count, m, fill.gaps if fill else None):
            if op is Op.FORWARD:
                run.forward()
            elif op is Op.BACKWARD:
                run.backward()
            else:
                assert fill is not None
                fill.work(op)
        stats.samples += len(batch)
        stats.steps += 1
        if run.losses:
            stats.losses.append(torch.stack(run.losses).sum())

    def _clip(self, block: Block, links: Links) -> None:
        if self.clip_norm:
            block.unscale("exact")
            gradients = block.gradients()
            everyone = links.all_gather(gradient_norms(gradients))
            clip_gradients(gradients, self.clip_norm, [n for norms in everyone for n in norms])


class _Pass:
    """One mini-batch on its way through one block."""

    def __init__(
        self,
        solver: Backprop,
        block: Block,
        links: Links,
        batch: Batch,
        micro_batches: int,
        recorders: list[tuple[Recorder, int]],
        stats: PhaseStats,
    ) -> None:
        self.block, self.links, self.recorders, self.stats = block, links, recorders, stats
        self.recompute = solver.recompute
        self.wire = Wire(solver.messages, solver.filter)
        self.size = len(batch)
        # autograd's adjoints are of the batch mean, too small for float16
        self.adjoint_scale = self.size if solver.messages == "float16" else 1
        sizes = [len(ids) for ids in batch.ids.tensor_split(micro_batches)]
        self.rows = deque(slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes)))
        self.images = deque(batch.images().split(sizes) if block.first else ())
        self.labels = deque(batch.labels().split(sizes) if block.last else ())
        self.graphs: deque[tuple[Tensor, Tensor]] = deque()
        self.losses: list[Tensor] = []

    def forward(self) -> None:
        if self.block.first:
            lam = self.images.popleft()
        else:
            lam = self.wire.receive(self.links.from_previous, self.block.dtype)
            lam = lam.detach().requires_grad_()
        if self.recompute:
            out = checkpoint(self.block.forward, lam, use_reentrant=False)
        else:
            out = self.block.forward(lam)
        if self.block.last:
            labels = self.labels.popleft()
            self.stats.classified(out, labels)
            out = self.block.loss(out, labels) * (len(labels) / self.size)
            self.losses.append(out.detach())
        else:
            self.wire.send(self.links.to_next, out.detach())
        self.graphs.append((lam, out))

    def backward(self) -> None:
        lam, out = self.graphs.popleft()
        p_out = None if self.block.last else self._from_next(out)
        if out.requires_grad:
            with _spared_statistics(self.block.module) if self.recompute else nullcontext():
                self.block.backward(out, p_out)
        p_in = self.block.input_adjoint(lam)
        if not self.block.first:
            assert p_in is not None
            self._to_previous(p_in)
        rows = self.rows.popleft()
        for recorder, start in self.recorders:
            recorder.record(
                slice(start + rows.start, start + rows.stop),
                None if self.block.first else lam.detach(),
                None if p_in is None else self.block.kept_adjoint(p_in * self.size),
                None if self.block.last else out.detach(),
                None if p_out is None else self.block.kept_adjoint(p_out * self.size),
            )

    def _from_next(self, out: Tensor) -> Tensor:
        dtype = out.dtype if self.block.scaler is None else torch.float32
        p = self.wire.receive(self.links.from_next, dtype)
        return p if self.adjoint_scale == 1 else p / self.adjoint_scale

    def _to_previous(self, p: Tensor) -> None:
        self.wire.send(
            self.links.to_previous, p if self.adjoint_scale == 1 else p * self.adjoint_scale
        )


@contextmanager
def _spared_statistics(module: nn.Module) -> Iterator[None]:
    """BatchNorm moves copies of its running statistics: a recomputed pass counts only once.

    Frozen ones would not do: what a recomputed pass saves must be what the first one saved.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [dict(m._buffers) for m in norms]
    for m in norms:
        m._buffers.update({k: b.clone() for k, b in m._buffers.items() if b is not None})
    try:
        yield
    finally:
        for m, buffers in zip(norms, kept, strict=True):
            m._buffers.update(buffers)
