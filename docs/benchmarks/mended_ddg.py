"""`DDG` with what is said to help a delay, and with local steps where its ranks wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hybrid.solvers import DDG
from hybrid.solvers.base import program_of
from hybrid.solvers.blocks.buffers import frozen_statistics
from hybrid.solvers.delayed.ddg import StashingProgram
from hybrid.solvers.delayed.flights import Flight
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.windows import PhaseStats


class Recorded(NamedTuple):
    """A micro-batch that has come home: what a local loss needs of it."""

    part: MicroBatch
    lam: Tensor
    sent: Tensor | None
    """x_k as it went up; None on the last block."""
    p_out: Tensor | None
    """The adjoint that came back for it."""


@dataclass(frozen=True)
class Mended(DDG):
    r"""`DDG`, each of these off unless asked for.

    rise: learning rates begin at lr / (1 + tau)^p, tau = d_k / m, p falls from 1 to 0 within this
    share of the training (after PipeMare's T1, arXiv 1910.05124).
    spike: w <- w - lr (a v + b g), a = M^tau, b = (1 - M^tau) / (1 - M) for momentum M (Kosson et
    al., arXiv 2003.11666); tau = 1 is Nesterov's.
    local: l, the mean gradient at w_k of the augmented Lagrangian's local loss over the last so
    many mini-batches that came home, is worked out in the ticks of the next, micro-batch by
    micro-batch where the rank has sent and would wait, and local_lr l is added to that one's own.
    """

    name: ClassVar[str] = "mended-ddg"

    rise: float = 0.0
    spike: bool = False
    local: int = 0
    local_lr: float = 0.6
    beta: float = 5e-4
    total_steps: int = 0


@program_of(Mended)
class MendedProgram(StashingProgram):
    """One rank's ticks, mended."""

    solver: Mended

    def begin(self) -> None:
        super().begin()
        solver, size = self.solver, self.setup.batch_size
        self._tau = self._delay / solver.num_micro_batches(size)
        self._home: deque[Sequence[Recorded]] = deque(maxlen=solver.local)
        self._coming: list[Recorded] = []
        self._returned: tuple[Tensor | None, Tensor | None] = (None, None)
        self._sums: dict[torch.nn.Parameter, Tensor] = {}

    def drain(self) -> PhaseStats:
        self._home.clear()
        return super().drain()

    def _backward(self, flight: Flight) -> None:
        self._flying = flight
        super()._backward(flight)

    def _receive_adjoint(self, part: MicroBatch, dtype: torch.dtype) -> Tensor:
        p_out = super()._receive_adjoint(part, dtype)
        assert self._flying.out is not None
        self._returned = (self._flying.out.detach(), p_out)
        return p_out

    def _finish(self, part: MicroBatch, lam: Tensor) -> None:
        if self.solver.local:
            self._coming.append(Recorded(part, lam.detach(), *self._returned))
        super()._finish(part, lam)

    def _step(self, part: MicroBatch) -> None:
        for mini_batch in self._home:
            self._add_local(mini_batch[part.number])
        if part.is_last:
            for p, total in self._sums.items():
                if p.grad is not None:
                    p.grad.add_(total, alpha=self.solver.local_lr / len(self._home))
            self._sums = {}
            if self._coming:
                self._home.appendleft(self._coming)
                self._coming = []
        self._mended_step(part)

    def _add_local(self, recorded: Recorded) -> None:
        """Add a micro-batch's share of the local loss's gradient."""
        part, lam, sent, p_out = recorded
        exact = [(p, p.grad) for p in self.block.module.parameters()]
        self.block.module.zero_grad(set_to_none=True)
        with frozen_statistics(self.block.module):
            out = self.block.forward(self._leaf(lam), part.key)
        if p_out is None:
            assert part.labels is not None
            loss = self.block.classify(out, part.labels).loss * part.share
            self.block.backward(loss, key=part.key)
        else:
            apart = 2 * self.solver.beta / part.size * (out.detach() - sent)
            self.block.backward(out, p_out + apart, key=part.key)
        for p, before in exact:
            if p.grad is not None:
                self._sums[p] = self._sums[p].add_(p.grad) if p in self._sums else p.grad
            p.grad = before

    def _mended_step(self, part: MicroBatch) -> None:
        scheduled = self._rate
        if self.solver.rise:
            done = part.step / (self.solver.rise * self.solver.total_steps)
            self._rate = scheduled * (1 + self._tau) ** -(1 - min(done, 1.0))
        (group,) = [g for g in self.block.optimizers["local"].param_groups if g["weight_decay"]]
        decay, momentum = group["weight_decay"], group["momentum"]
        decayed = set(group["params"])
        before = []
        if self.solver.spike and part.is_last:
            for p in self.block.module.parameters():
                assert p.grad is not None
                before.append(p.grad + decay * p.detach() if p in decayed else p.grad.clone())
        super()._step(part)
        a = momentum**self._tau
        b = (1 - a) / (1 - momentum)
        for p, g in zip(self.block.module.parameters(), before, strict=False):
            v = self.block.optimizers["local"].state[p]["momentum_buffer"]
            p.data.add_((1 - b) * g + (momentum - a) * v, alpha=self._rate)  # less Nesterov's own
        self._rate = scheduled
