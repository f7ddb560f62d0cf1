"""HPSGD: gradients travel while replicas go on; what lands replaces what they did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Acts, Count, CountOrZero
from hybrid.solvers.state import Tensors
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.local import AnchoredSync
from hybrid.solvers.sync.reduction import counted_on_device, packed, unpack, used_anywhere

DRIFTS = Acts("replicas drift before a round lands (sync.lag is above 0)", lambda run: run.sync.lag)


@dataclass(frozen=True)
class HPSGD(Strategy):
    r"""Hierarchical parallel SGD, following Zhou et al., arXiv 2009.02701, with fixed rounds.

    B: the weights all replicas agree on; S_r: the sum of replica r's gradients in this round, over
    its n_r samples of N, weight decay wd included.

        each step         g_r = mean gradient at w_r + wd w_r
                          S_r <- S_r + (n_r / N) g_r,   w_r <- w_r - lr g_r
        every h-th        P = sum over replicas of S_r, under way;   S_r <- 0
        L steps later     B <- optimizer step from B on P, without decay;   w_r <- B

    The paper lets ranks ask whether P has landed; here it lands `lag` = L steps after it left, the
    same on all. Local steps are plain ones, without momentum. What a replica has done meanwhile is
    thrown away (drift "discard", the paper's; its gradients are in S_r) or kept ("keep"):
    w_r <- B - lr (N / n_r) S_r. With L = 0 and h = 1 a round is one step of the optimizer, and its
    weights are all-reduce's, bit for bit; with L = 0 and plain SGD they are local SGD's. A round
    may last longer than an epoch.

    A step on P stands for h steps, which it does for SGD alone: Adam and its like divide by the
    gradient's size, so theirs would be one step of a usual size in the place of h.
    """

    name: ClassVar[str] = "hpsgd"
    anchored: ClassVar[bool] = True
    plain: ClassVar[bool] = True

    steps: Count = 4
    """h, steps whose gradients travel together."""
    lag: CountOrZero = 4
    """L, steps that they take."""
    drift: Annotated[Literal["discard", "keep"], DRIFTS] = "keep"
    """What becomes of local steps when a round lands."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag > self.steps:
            raise ValueError(
                f"lag is {self.lag} of rounds of {self.steps} steps: choose one of at most "
                "sync.steps, or two rounds would be under way"
            )

    def copies(self, replicas: int) -> float:
        """B, a slot of `Outer`, S; while a round is under way P, as it is and packed."""
        return 5 if self.lag else 3


class HPSGDSync(AnchoredSync):
    """One replica's drift, and the round that is under way."""

    strategy: HPSGD
    own_optimizers = False  # all make the same steps from B

    def begin(self) -> None:
        super().begin()
        self._decays = [0.0] * len(self.weights())
        """wd of every weight, where the gradient of a step has it in place of the optimizer's."""
        if self.strategy.steps > 1 or self.strategy.lag:
            self._check_optimizer()
            groups = self.block.optimizers["exact"].param_groups
            self._decays = [g["weight_decay"] for g in groups for _ in g["params"]]
            for group in groups:
                group["weight_decay"] = 0.0
        self._sent: list[Tensor] = []
        """This replica's part of the round under way."""
        self._sent_used = self._unused()
        """Whether that part has a gradient of each weight."""
        self._sums: list[Tensor] = []
        """S_r; empty: nothing yet."""
        self._used = self._unused()
        """Whether this round has a gradient of each weight."""
        self._started, self._rate = 0, 0.0
        self._moved = False

    def _check_optimizer(self) -> None:
        optimizer, strategy = self.block.optimizers["exact"], self.strategy
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError(
                "the optimizer maximizes, and the steps of sync.name 'hpsgd' between rounds go "
                "down: give the loss the other sign, or choose sync.name=local-sgd"
            )
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"the optimizer is {type(optimizer).__name__}, and sync.name 'hpsgd' with "
                f"sync.steps {strategy.steps} and sync.lag {strategy.lag} takes one step of it on "
                "the summed gradients of a round, which is worth as many steps with SGD alone: "
                "choose optimizer.name=sgd, or sync.name=local-sgd"
            )

    def before_step(self, kind: str, rate: float) -> bool:
        strategy = self.strategy
        if not self.count:
            self.move_anchor()  # a run may go on with weights that no round has ended in
        weights = self.weights()
        gradients = [self._gradient(p, wd) for p, wd in zip(weights, self._decays, strict=True)]
        self._rate = rate
        self._used = [
            before or p.grad is not None for p, before in zip(weights, self._used, strict=True)
        ]
        if self._sums:
            torch._foreach_add_(self._sums, gradients)
        else:
            self._sums = [g.clone() for g in gradients]
        done = self.count + 1
        # beyond it, too: a run may go on with another lag
        if self._finish_sum is not None and done >= self._started + strategy.lag:
            self._take_sum()
        elif strategy.lag == 0 and done % strategy.steps == 0:
            self._start(done)
            self._take_sum()
        else:
            drifted = [p.detach() for p in weights]
            torch._foreach_add_(drifted, gradients, alpha=-rate / self.share)
        return self._moved

    def _gradient(self, p: nn.Parameter, decay: float) -> Tensor:
        if p.grad is None:  # which its optimizer would not let decay either
            return torch.zeros_like(p)
        return p.grad.add(p.detach(), alpha=self.share * decay) if decay else p.grad

    def after_own_step(self) -> None:
        if self._moved:
            self._finish_round()
        if self.strategy.lag and self.count % self.strategy.steps == 0:
            self._start(self.count)

    def _start(self, count: int) -> None:
        self._started = count
        self._sent, self._sums = self._sums, []
        self._sent_used = self._used
        self._used = self._unused()
        self._begin_sum()

    def _begin_sum(self) -> None:
        counts = counted_on_device(self._sent_used, self.weights())
        self._finish_sum = self._mean.start(packed([*self._sent, counts]))

    def _take_sum(self) -> None:
        """Let w = B and its gradient be P; there is none of what no replica has used."""
        assert self._finish_sum is not None
        total, mine = [torch.empty_like(p) for p in self.weights()], self._sent_used
        counts = counted_on_device(mine, self.weights())
        unpack(self._finish_sum(), [*total, counts])
        self._finish_sum, self._sent, self._moved = None, [], True
        self.return_to_anchor()
        for p, gradient, times in zip(
            self.weights(), total, used_anywhere(mine, counts), strict=True
        ):
            p.grad = gradient if times else None

    def _finish_round(self) -> None:
        """B = w, after the optimizer's step; add the local steps that are kept."""
        self._moved = False
        self.move_anchor()
        self.apart = bool(self._sums)  # and statistics differ where drift is discarded, too
        if self.apart and self.strategy.drift == "keep":
            drifted = [p.detach() for p in self.weights()]
            torch._foreach_add_(drifted, self._sums, alpha=-self._rate / self.share)
        if not self.apart:
            self.join_statistics()

    def under_way(self) -> Tensors:
        found = {f"sum {i:05}": s for i, s in enumerate(self._sums)}
        if self._finish_sum is not None:
            found |= {f"sent {i:05}": s for i, s in enumerate(self._sent)}
            found["sent used"] = torch.tensor(self._sent_used)
        return found | {"started": torch.tensor(self._started), "used": torch.tensor(self._used)}

    def _unused(self) -> list[bool]:
        return [False] * len(self.weights())

    def load_under_way(self, saved: Tensors) -> None:
        self._started, self._used = int(saved["started"]), saved["used"].bool().tolist()
        self._sums = self._saved_tensors(saved, "sum ")
        if "sent used" in saved:
            self._sent_used = saved["sent used"].tolist()
            self._sent = self._saved_tensors(saved, "sent 0")
            self._begin_sum()

    def _saved_tensors(self, saved: Tensors, prefix: str) -> list[Tensor]:
        found = [saved[name] for name in sorted(saved) if name.startswith(prefix)]
        pairs = zip(self.weights(), found, strict=False)
        return [torch.empty_like(p).detach().copy_(t) for p, t in pairs]


HPSGD.program = HPSGDSync
