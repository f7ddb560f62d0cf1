"""HPSGD: gradients travel while replicas go on; what lands replaces what they did meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from solvers.checks import check_choices, check_numbers
from solvers.state import Tensors
from solvers.sync.base import Strategy
from solvers.sync.local import AnchoredSync
from solvers.sync.reduction import packed, unpack


@dataclass(frozen=True)
class HPSGD(Strategy):
    r"""Hierarchical parallel SGD, following Zhou et al., arXiv 2009.02701, with fixed rounds.

    B: the weights all replicas agree on; S_r: the sum of replica r's gradients in this round.

        each step         g_r = gradient at w_r,   S_r <- S_r + g_r,   w_r <- w_r - lr g_r
        every h-th        P = sum over replicas of S_r, under way;   S_r <- 0
        L steps later     B <- optimiser step from B on P,   w_r <- B

    The paper lets ranks ask whether P has landed; here it lands `lag` = L steps after it left, the
    same on all. Local steps are plain ones, without momentum. What a replica has done meanwhile is
    thrown away (drift "discard", the paper's; its gradients are in S_r) or kept ("keep"):
    w_r <- B - lr S_r. With L = 0 and h = 1 its weights are all-reduce's, bit for bit; with L = 0
    and plain SGD local SGD. At the end of an epoch all of it lands: every gradient counts once.
    """

    name: ClassVar[str] = "hpsgd"
    anchored: ClassVar[bool] = True
    plain: ClassVar[bool] = True

    steps: int = 4
    """h, steps whose gradients travel together."""
    lag: int = 4
    """L, steps that they take."""
    drift: Literal["discard", "keep"] = "keep"
    """What becomes of local steps when a round lands."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, not_negative=("lag",), at_least_one=("steps",))
        if self.lag > self.steps:
            raise ValueError(
                f"lag is {self.lag} of rounds of {self.steps} steps: choose one of at most "
                "sync.steps, or two rounds would be under way"
            )

    def inert(self, blocks: int) -> str:
        if self.lag == 0 and self.drift == "discard":
            return "sync.drift is 'discard', but sync.lag is 0: a round lands before any drift"
        return ""

    def copies(self, replicas: int) -> float:
        """B, a slot of `Outer`, S; while a round is under way P, as it is and packed."""
        return 5 if self.lag else 3


class HPSGDSync(AnchoredSync):
    """One replica's drift, and the round that is under way."""

    strategy: HPSGD

    def begin(self) -> None:
        super().begin()
        self._landing: Callable[[], Tensor] | None = None
        self._sent: list[Tensor] = []
        """This replica's part of the round under way."""
        self._sums: list[Tensor] = []
        """S_r; empty: nothing yet."""
        self._started, self._rate, self._kind = 0, 0.0, ""
        self._moved = False

    def before_step(self, kind: str, rate: float) -> bool:
        strategy = self.strategy
        self.anchors()
        weights = self.weights()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
        self._rate, self._kind = rate, kind
        if self._sums:
            torch._foreach_add_(self._sums, gradients)
        else:
            self._sums = [g.clone() for g in gradients]
        done = self.count + 1
        # beyond it, too: a run may go on with another lag
        if self._landing is not None and done >= self._started + strategy.lag:
            self._aim()
        elif strategy.lag == 0 and done % strategy.steps == 0:
            self._start(done)
            self._aim()
        else:
            drifted = [p.detach() for p in weights]
            torch._foreach_add_(drifted, gradients, alpha=-rate / self.share)
        return self._moved

    def drifts(self, name: str) -> bool:
        # all make the same steps from B, and a mean of equal numbers has other bits
        return name.startswith("ema ")

    def stepped(self) -> None:
        if self._moved:
            self._landed()
        if self.strategy.lag and self.count % self.strategy.steps == 0:
            self._start(self.count)

    def settle(self) -> None:
        if self._landing is not None:
            self._go()
        if self._sums:
            self._start(self.count)
            self._go()
        self.back()

    def _start(self, count: int) -> None:
        self._started = count
        self._sent, self._sums = self._sums, []
        self._begin_sum()

    def _begin_sum(self) -> None:
        self._landing = self._mean.start(packed(self._sent))

    def _aim(self) -> None:
        """Let w = B and its gradient be P."""
        assert self._landing is not None
        total = [torch.empty_like(p) for p in self.weights()]
        unpack(self._landing(), total)
        self._landing, self._sent, self._moved = None, [], True
        self.back()
        for p, gradient in zip(self.weights(), total, strict=True):
            p.grad = gradient

    def _landed(self) -> None:
        """B = w, after the optimiser's step; add what is kept."""
        self._moved = False
        self.anchor()
        if self.strategy.drift == "keep" and self._sums:
            drifted = [p.detach() for p in self.weights()]
            torch._foreach_add_(drifted, self._sums, alpha=-self._rate / self.share)
        if self.strategy.lag == 0:
            self.join_statistics()

    def _go(self) -> None:
        """A step outside of `Block.step`, with the last one's rate."""
        self._aim()
        self.block.move(self._kind, self._rate)
        for p in self.weights():
            p.grad = None
        self._moved = False
        self.anchor()

    def under_way(self) -> Tensors:
        found = {f"sum {i:05}": s for i, s in enumerate(self._sums)}
        if self._landing is not None:
            found |= {f"sent {i:05}": s for i, s in enumerate(self._sent)}
        return found | {"started": torch.tensor(self._started)}

    def go_on(self, kept: Tensors) -> None:
        self._started = int(kept["started"])
        self._sums, self._sent = self._like(kept, "sum "), self._like(kept, "sent ")
        if self._sent:
            self._begin_sum()

    def _like(self, kept: Tensors, prefix: str) -> list[Tensor]:
        found = [kept[name] for name in sorted(kept) if name.startswith(prefix)]
        pairs = zip(self.weights(), found, strict=False)
        return [torch.empty_like(p).detach().copy_(t) for p, t in pairs]


HPSGD.program = HPSGDSync
