"""HPSGD: replicas keep training while the gradients of h steps are summed."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, Count, CountOrZero
from hybrid.solvers.state import State
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.periodic import ByWeight, PeriodicSync, numbered
from hybrid.solvers.sync.reduction import pack, use_counts, used_anywhere

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

    In the paper a rank polls whether P has landed; here P lands `lag` = L steps after it was sent,
    on all ranks. Local steps are plain SGD, without momentum. The local steps since then are
    thrown away (drift "discard", as in the paper; their gradients are in S_r) or kept ("keep"):
    w_r <- B - lr (N / n_r) S_r. With L = 0 and h = 1 a round is one step of the optimizer, and its
    weights are all-reduce's, bit for bit; with L = 0 and plain SGD they are local SGD's. A round
    may last longer than an epoch.

    A step on P replaces h steps, which only SGD allows: Adam and similar optimizers divide by the
    gradient's size, so they would take one step of the usual size in place of h.
    """

    name: ClassVar[str] = "hpsgd"
    anchored: ClassVar[bool] = True
    plain: ClassVar[bool] = True

    steps: Count = 4
    """h, steps between sums of gradients."""
    lag: CountOrZero = 4
    """L, steps until their sum is applied."""
    drift: Annotated[Literal["discard", "keep"], DRIFTS] = "keep"
    """Discard or keep the local steps taken during the lag."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag > self.steps:
            raise ValueError(
                f"lag is {self.lag} of rounds of {self.steps} steps: choose one of at most "
                "sync.steps, or two rounds would be under way"
            )

    def copies(self, replicas: int) -> float:
        """Count B, a slot of `Outer` and S and, with a lag, P twice: by weight and packed."""
        return 5 if self.lag else 3


class HPSGDSync(PeriodicSync):
    """One replica's drift, and the round under way."""

    strategy: HPSGD

    def begin(self) -> None:
        super().begin()
        self._decays = [0.0] * len(self.weights())
        """wd of every weight, if the gradient of a step includes it in place of the optimizer."""
        if self.strategy.steps > 1 or self.strategy.lag:
            optimizer = self.block.optimizers["exact"]
            groups = optimizer.param_groups
            minimizes = not any(group.get("maximize") for group in groups)
            rates = {group.get("lr_ratio", 1.0) for group in groups}
            if not (isinstance(optimizer, torch.optim.SGD) and minimizes and len(rates) == 1):
                raise ValueError(
                    f"the optimizer is {type(optimizer).__name__}, and sync.name 'hpsgd' takes one "
                    "step of it on the gradients of several, which needs SGD that minimizes with "
                    "one learning rate: choose optimizer.name=sgd, or sync.name=local-sgd"
                )
            self._decays = [g["weight_decay"] for g in groups for _ in g["params"]]
            for group in groups:
                group["weight_decay"] = 0.0
        self._sums: ByWeight = {}
        """S_r, of the weights with a gradient in this round."""
        self._rate = 0.0
        self._landed = False
        """Whether the newest step is the optimizer's step on P."""

    def before_step(self, kind: str, rate: float) -> bool:
        h, lag, done = self.strategy.steps, self.strategy.lag, self.count + 1
        if not self.count:
            self._move_anchor()  # a run may resume with weights from within a round
        gradients = self._gradients()
        self._rate = rate
        add(gradients, self._sums)
        if not self.is_due(done) and lag == 0 and done % h == 0:
            self._send(done)
        self._landed = self.is_due(done)
        if self._landed:
            self._take_sum()
        else:
            self._drift(gradients)
        return self._landed

    def _gradients(self) -> ByWeight:
        """Return (n_r / N) g_r; a weight that no sample has used does not decay either."""
        return {
            i: p.grad.add(p.detach(), alpha=self.share * decay) if decay else p.grad
            for i, (p, decay) in enumerate(zip(self.weights(), self._decays, strict=True))
            if p.grad is not None
        }

    def _drift(self, gradients: ByWeight) -> None:
        """Take a plain gradient step, without the optimizer."""
        weights = {i: p.detach() for i, p in enumerate(self.weights())}
        add(gradients, weights, -self._rate / self.share)

    def after_replica_step(self) -> None:
        if self._landed:
            self._move_anchor()
            self.apart = self.count > self.started  # even without drift the statistics differ
            if not self.apart:
                self.join_statistics()
            elif self.strategy.drift == "keep":
                self._drift(self._sums)
        if self.strategy.lag and self.count % self.strategy.steps == 0:
            self._send(self.count)

    def _send(self, count: int) -> None:
        sums, self._sums = self._sums, {}
        self.start(count, sums)

    def message(self) -> Tensor:
        """Pack S_r, and flags of the weights in it."""
        weights, used = self.weights(), self._used()
        sums = [self.sent[i] if u else torch.zeros_like(weights[i]) for i, u in enumerate(used)]
        return pack([*sums, use_counts(used, weights)])

    def _used(self) -> list[bool]:
        return [i in self.sent for i in range(len(self.weights()))]

    def _take_sum(self) -> None:
        """Set w = B with gradient P; a weight that no replica has used has no gradient."""
        weights, used = self.weights(), self._used()
        total, counts = [torch.empty_like(p) for p in weights], use_counts(used, weights)
        self.take([*total, counts])
        self.replace([b.clone() for b in self.anchors()])
        for p, gradient, times in zip(weights, total, used_anywhere(used, counts), strict=True):
            p.grad = gradient if times else None

    def _move_anchor(self) -> None:
        """Set B = w."""
        torch._foreach_copy_(self.anchors(), [p.detach() for p in self.weights()])

    def state(self) -> State:
        state = super().state()
        state.flight |= numbered("sum", self._sums)
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._sums = self.by_weight(state.flight, "sum")


def add(terms: ByWeight, sums: ByWeight, factor: float = 1.0) -> None:
    """Add multiples of terms to the sums of the same weights; a missing sum becomes a copy."""
    if both := [i for i in terms if i in sums]:
        torch._foreach_add_([sums[i] for i in both], [terms[i] for i in both], alpha=factor)
    sums |= {i: term.clone() for i, term in terms.items() if i not in sums}


HPSGD.program = HPSGDSync
