"""Exact forward-backward through the links: serial training and the hybrid's correction pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.base import (
    Batch,
    Block,
    Links,
    PhaseStats,
    Recorder,
    Solver,
    Window,
    clip_gradients,
    frozen_statistics,
    gradient_norms,
)


@dataclass
class Backprop(Solver):
    r"""Back-propagation over K blocks, pipelined over m micro-batches.

    Forward   lam_{k+1} = x_k = f_k(lam_k; w_k),   lam_0 the image
    Backward  p_k = (d x_k / d lam_k)^T p_{k+1},   p_K = d phi / d x_{K-1}
    Step      w_k <- optimiser step with the sum over micro-batches of (d x_k / d w_k)^T p_{k+1}

    With m = 1 it equals a plain training loop bit for bit, whatever K. With m > 1 the micro-batches
    run in the one-forward-one-backward order (Narayanan et al., arXiv 2006.09503); K = 3, m = 4:

        block 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        block 1      F0 F1 .  B0 F2 B1 F3 B2 .  B3
        block 2         F0 B0 F1 B1 F2 B2 F3 B3

    so block k holds at most K - k graphs at once and idles for about (K-1) of m+K-1 slots.
    BatchNorm then normalises each micro-batch by its own statistics, and its running statistics
    are updated m times a step: m > 1 is a different, equally valid training run.
    """

    name: ClassVar[str] = "backprop"
    exact: ClassVar[bool] = True

    micro_batches: int = 1
    """Parts of a mini-batch that are in the pipeline at once; 1 is exact, bit for bit."""
    clip_norm: float = 0.0
    """Largest norm of the whole network's gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}; it must be at least 1")
        if self.clip_norm < 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be 0 (off) or positive")

    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """One exact step a mini-batch, recorded where the window has a recorder."""
        stats = PhaseStats()
        with stats.timed():
            for rows, batch in window.recorded():
                self.gradient(block, links, batch, rows, window.recorder, stats)
                self._clip(block, links)
                block.step("exact", batch.learning_rate)
            links.flush()
        return stats

    def observe(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Record an exact pass over the window without a step or a change of statistics."""
        stats = PhaseStats()
        with stats.timed(), frozen_statistics(block.module):
            for rows, batch in window.recorded():
                self.gradient(block, links, batch, rows, window.recorder, stats)
                block.module.zero_grad(set_to_none=True)
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
    ) -> None:
        """Leave the exact gradient of the batch-mean loss in the parameters."""
        m = min(self.micro_batches, len(batch))
        run = _Pass(block, links, batch, m, rows.start, recorder, stats)
        warm_up = min(m, block.count - 1 - block.index)
        for _ in range(warm_up):
            run.forward()
        for _ in range(m - warm_up):
            run.forward()
            run.backward()
        for _ in range(warm_up):
            run.backward()
        stats.samples += len(batch)
        stats.steps += 1
        if run.losses:
            stats.losses.append(torch.stack(run.losses).sum())

    def _clip(self, block: Block, links: Links) -> None:
        if self.clip_norm:
            gradients = block.gradients()
            everyone = links.all_gather(gradient_norms(gradients))
            clip_gradients(gradients, self.clip_norm, [n for norms in everyone for n in norms])


class _Pass:
    """One mini-batch on its way through one block."""

    def __init__(
        self,
        block: Block,
        links: Links,
        batch: Batch,
        micro_batches: int,
        start: int,
        recorder: Recorder | None,
        stats: PhaseStats,
    ) -> None:
        self.block, self.links, self.recorder, self.stats = block, links, recorder, stats
        self.size = len(batch)
        sizes = [len(ids) for ids in batch.ids.tensor_split(micro_batches)]
        self.rows = deque(
            slice(start + sum(sizes[:i]), start + sum(sizes[: i + 1])) for i in range(len(sizes))
        )
        self.images = deque(batch.images().split(sizes) if block.first else ())
        self.labels = deque(batch.labels().split(sizes) if block.last else ())
        self.graphs: deque[tuple[Tensor, Tensor]] = deque()
        self.losses: list[Tensor] = []

    def forward(self) -> None:
        if self.block.first:
            lam = self.images.popleft()
        else:
            lam = self.links.from_previous().detach().requires_grad_()
        out = self.block.forward(lam)
        if self.block.last:
            labels = self.labels.popleft()
            self.stats.classified(out, labels)
            out = self.block.loss(out, labels) * (len(labels) / self.size)
            self.losses.append(out.detach())
        else:
            self.links.to_next(out.detach())
        self.graphs.append((lam, out))

    def backward(self) -> None:
        lam, out = self.graphs.popleft()
        p_out = None if self.block.last else self.links.from_next()
        if out.requires_grad:
            out.backward(p_out)
        if not self.block.first:
            assert lam.grad is not None
            self.links.to_previous(lam.grad)
        if self.recorder is not None:
            self.recorder.record(
                self.rows.popleft(),
                None if self.block.first else lam.detach(),
                None if lam.grad is None else lam.grad * self.size,
                None if self.block.last else out.detach(),
                None if p_out is None else p_out * self.size,
            )
