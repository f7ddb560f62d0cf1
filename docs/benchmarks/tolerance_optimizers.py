"""Orders, optimizers and mends that `tolerance.py` compares and this project does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid.solvers import DDG
from hybrid.solvers.base import program_of
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import DelayedProgram
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.policies import StashWeights
from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.numerics.optimizer_state import clone_optimizer, with_groups
from hybrid.solvers.state import Tensors

Group = dict[str, Any]


@dataclass(frozen=True)
class Late(DDG):
    """DDG's order, as late as it would be in a pipeline of more blocks or fewer."""

    name: ClassVar[str] = "ddg-late"

    ticks: int = 7
    """The delay of block 0."""

    def delay(self, index: int, count: int) -> int:
        if self.ticks < count - 1:  # each of fewer blocks is several of these
            return self.ticks - index * (self.ticks + 1) // count
        return round(self.ticks * (count - 1 - index) / (count - 1))


@dataclass(frozen=True)
class TwoBuffered(DDG):
    """2BW (arXiv 2006.09503): every mini-batch at the weights of one step before, on all blocks."""

    name: ClassVar[str] = "2bw"


class TwoBuffers(StashWeights):
    """Versions that change between mini-batches; m must be K - 1 at least."""

    def __init__(self, block: Block) -> None:
        super().__init__(block, recompute=False)
        self._newest: Tensors = {}
        self._before: Tensors = {}

    def forward(self, flight: Flight) -> Tensor:
        flight.weights = self._version(flight.part)
        flight.out = self.compute(flight)
        return flight.out

    def _version(self, part: MicroBatch) -> Tensors:
        if part.number == 0:
            weights = self.stash.parameters.items()
            now = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in weights}
            self._before, self._newest = self._newest or now, now
        # a step of a block with a delay comes after its next mini-batch's first forward pass
        return self._before if self.block.last else self._newest


@program_of(TwoBuffered)
class TwoBufferedProgram(DelayedProgram):
    """DDG's ticks with two buffers on every block."""

    def begin(self) -> None:
        super().begin()
        self.policy = TwoBuffers(self.block)


class RotatedAdam(torch.optim.Optimizer):
    r"""Adam in the eigenbasis of the gradient's statistics, following the summary of 2602.03515.

        L <- b2 L + (1 - b2) G G^T,   R <- b2 R + (1 - b2) G^T G       G: outputs x all others
        U, V <- QR(L U), QR(R V) every `every` steps; the eigenvectors of L, R at the first step
        M <- b1 M + (1 - b1) G,   S <- b2 S + (1 - b2) (U^T G V)^2
        w <- (1 - lr wd) w - lr U [ U^T M V / (sqrt(S / (1 - b2^t)) + eps) ] V^T / (1 - b1^t)

    M is kept unrotated, as in SOAP (Vyas et al., arXiv 2409.11321). Vectors have U = V = 1: Adam.
    """

    def __init__(
        self,
        params: list[Group],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        sides: str = "both",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "every": every, "sides": sides})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, grad: Tensor, group: Group) -> None:
        state, (b1, b2) = self.state[p], group["betas"]
        g = grad.flatten(1) if p.ndim > 1 else grad[:, None]
        matrix, one = p.ndim > 1, group["sides"] == "smaller"
        left = matrix and (not one or len(g) <= g.shape[1])
        right = matrix and (not one or len(g) > g.shape[1])
        if not state:
            state |= {"t": 0, "m": torch.zeros_like(g), "s": torch.zeros_like(g)}
            if left:
                state |= {"l": g @ g.T, "u": torch.linalg.eigh(g @ g.T)[1].contiguous()}
            if right:
                state |= {"r": g.T @ g, "v": torch.linalg.eigh(g.T @ g)[1].contiguous()}
        state["t"] += 1
        rotated, inner = g, state["m"].lerp_(g, 1 - b1)
        renewed = state["t"] % group["every"] == 0
        if left:
            state["l"].lerp_(g @ g.T, 1 - b2)
            if renewed:
                state["u"] = torch.linalg.qr(state["l"] @ state["u"])[0].contiguous()
            rotated, inner = state["u"].T @ rotated, state["u"].T @ inner
        if right:
            state["r"].lerp_(g.T @ g, 1 - b2)
            if renewed:
                state["v"] = torch.linalg.qr(state["r"] @ state["v"])[0].contiguous()
            rotated, inner = rotated @ state["v"], inner @ state["v"]
        state["s"].lerp_(rotated.square(), 1 - b2)
        update = inner / (state["s"] / (1 - b2 ** state["t"])).sqrt_().add_(group["eps"])
        update = state["u"] @ update if left else update
        update = update @ state["v"].T if right else update
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update.view(p.shape), alpha=-group["lr"] / (1 - b1 ** state["t"]))


class LateRates(torch.optim.Optimizer):
    r"""PipeMare's rates (arXiv 1910.05124, T1): lr / max(1, tau)^(1 - min(t / T, 1)) at step t."""

    def __init__(self, params: list[Group], inner: torch.optim.Optimizer, steps: int) -> None:
        super().__init__(params, {})
        self.defaults = {"inner": inner, "steps": steps}
        self.inner = inner if params is inner.param_groups else clone_optimizer(inner, params)
        self.steps, self.taken, self.state = steps, 0, self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        power = 1 - min(self.taken / self.steps, 1)
        self.taken += 1
        groups = [
            {**group, "lr": group["lr"] / max(1.0, group["delay"]) ** power}
            for group in self.param_groups
        ]
        with_groups(groups, self.inner).step()


def nadamw_by_delay(groups: list[Group], lr: float, steps: int, latest: float) -> Any:
    """NAdam whose momentum is 0.9 on time and 0.99 in the block that is `latest` steps late."""
    momentum = 0.9 + 0.09 * groups[0]["delay"] / latest
    return torch.optim.NAdam(
        groups,
        lr=lr,
        betas=(momentum, 0.999),
        weight_decay=0.01,
        decoupled_weight_decay=True,
        momentum_decay=200 / steps,
    )
