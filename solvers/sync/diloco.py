"""DiLoCo: every h local steps, an outer Nesterov step on the replicas' changes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.solvers.acting import Count, CountOrZero, Positive, Share
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.periodic import PeriodicSync
from hybrid.solvers.sync.reduction import MessageFormat, feedback_copies, pack


@dataclass(frozen=True)
class DiLoCo(Strategy):
    r"""DiLoCo (Douillard et al., arXiv 2311.08105). B: the common weights at a round's start.

        each step    w_r <- optimizer step of replica r on the mean gradient over its n_r samples
        every h-th   D = sum_r (n_r / N) (B - w_r),   V <- mu V + D,   B <- B - eta (D + mu V)

    The sum travels during the next `lag` steps. Then w_r <- B plus the change of the replica's
    weights since (streaming DiLoCo, Douillard et al., arXiv 2501.18512, overlaps likewise). With
    eta = 1 and mu = 0 it is local SGD.

    Outer steps happen only every h steps: a round may last longer than an epoch. The round that is
    under way when the training ends becomes the replicas' mean.
    """

    name: ClassVar[str] = "diloco"
    anchored: ClassVar[bool] = True

    steps: Count = 16
    """h, local steps between outer steps."""
    outer_lr: Positive = 0.7
    """eta, learning rate of the outer step."""
    outer_momentum: Share = 0.9
    """mu, Nesterov momentum of the outer step."""
    lag: CountOrZero = 0
    """L, steps until a sum over replicas is applied."""
    messages: MessageFormat = "float32"
    """Number format of weight changes between replicas; bfloat16 and int8 use error feedback."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag >= self.steps:
            raise ValueError(
                f"lag is {self.lag} of rounds of {self.steps} steps: choose one below sync.steps"
            )

    def copies(self, replicas: int) -> float:
        """Count B and V and, with a lag, the sum under way and the weights at its start."""
        return 2 + feedback_copies(self.messages, replicas) + (2 if self.lag else 0)


class DiLoCoSync(PeriodicSync):
    """One replica's weights, and the round under way."""

    strategy: DiLoCo

    def before_step(self, kind: str, rate: float) -> bool:
        self.anchors()
        return super().before_step(kind, rate)

    def after_replica_step(self) -> None:
        if self.is_due(self.count):
            self._outer_step()
        if self.count % self.strategy.steps == 0:
            self.start(self.count, {i: p.detach().clone() for i, p in enumerate(self.weights())})
            if not self.strategy.lag:
                self._outer_step()

    def message(self) -> Tensor:
        """(n_r / N) (B - w_r): the sum over replicas is D."""
        change = [b - w for b, w in zip(self.anchors(), self.sent.values(), strict=True)]
        return pack(change) * self.share

    def _outer_step(self) -> None:
        """V <- mu V + D, B <- B - eta (D + mu V), w_r <- B + change of w_r since the sum began."""
        anchors, momenta = self.anchors(), self.outer.slots("momentum")
        eta, mu = self.strategy.outer_lr, self.strategy.outer_momentum
        start, change = [*self.sent.values()], [torch.empty_like(b) for b in anchors]
        self.take(change)
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, change)
        torch._foreach_add_(change, momenta, alpha=mu)
        torch._foreach_add_(anchors, change, alpha=-eta)
        new = [b.clone() for b in anchors]
        self.apart = self.count > self.started
        if self.apart:
            since = torch._foreach_sub([p.detach() for p in self.weights()], start)
            torch._foreach_add_(new, since)
        else:
            self.join_statistics()
        self.replace(new)


DiLoCo.program = DiLoCoSync
