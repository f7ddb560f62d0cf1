"""DiLoCo: an outer step with Nesterov momentum on what the replicas have done in h steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, Count, CountOrZero, Positive, Share
from hybrid.solvers.state import Tensors
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.local import AnchoredSync, OptimizerState
from hybrid.solvers.sync.messages import MessageFormat
from hybrid.solvers.sync.reduction import left_over, packed, unpack

TAKES_TURNS = Acts("there are several blocks to take turns", lambda run: run.setup.blocks > 1)


@dataclass(frozen=True)
class DiLoCo(Strategy):
    r"""DiLoCo (Douillard et al., arXiv 2311.08105). B: the weights that all replicas began with.

        each step    w_r <- optimizer step of replica r on the mean gradient over its n_r samples
        every h-th   D = sum_r (n_r / N) (B - w_r),   V <- mu V + D,   B <- B - eta (D + mu V)

    and `lag` steps later, while which the sum travels, w_r <- B, to which a replica adds what it
    has done since (streaming DiLoCo, Douillard et al., arXiv 2501.18512, overlaps so). Blocks are
    the fragments of that paper: where they are `streamed`, block k's rounds end k h / K steps after
    block 0's, so that not all ranks send at once. With eta = 1 and mu = 0 it is local SGD.

    An outer step is taken after h steps and at no other time: a round may last longer than an
    epoch, and the one that is under way when the training ends becomes the replicas' mean.
    """

    name: ClassVar[str] = "diloco"
    anchored: ClassVar[bool] = True

    steps: Count = 16
    """h, steps from one outer step to the next."""
    outer_lr: Positive = 0.7
    """eta, size of the outer step."""
    outer_momentum: Share = 0.9
    """mu, Nesterov momentum of the outer step."""
    lag: CountOrZero = 0
    """Steps that a sum over replicas may take."""
    streamed: Annotated[bool, TAKES_TURNS] = False
    """Whether blocks end their rounds at different steps."""
    optimizer_state: OptimizerState = "own"
    """What inner optimizers keep: each replica's own for good, or at a round's end the mean."""
    messages: MessageFormat = "float32"
    """Number format of D between replicas: float32, or bfloat16, int8 with feedback."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag >= self.steps:
            raise ValueError(
                f"lag is {self.lag} of rounds of {self.steps} steps: choose one below sync.steps"
            )

    def copies(self, replicas: int) -> float:
        """B and V; while a sum is under way what is in it, and the weights it began with."""
        return 2 + left_over(self.messages, replicas) + (2 if self.lag else 0)


class DiLoCoSync(AnchoredSync):
    """One replica's weights, and the round that is under way."""

    strategy: DiLoCo

    def begin(self) -> None:
        super().begin()
        self._sent: list[Tensor] = []
        """This replica's weights when the round under way began its sum."""
        self._started = 0
        self._left: Tensors = {}
        """What messages had left out before the sum under way."""
        block, steps = self.block, self.strategy.steps
        streamed = self.strategy.streamed
        self._offset = block.index * steps // block.count if streamed else 0

    @property
    def _messages(self) -> MessageFormat:
        return self.strategy.messages

    def before_step(self, kind: str, rate: float) -> bool:
        self.anchors()
        return super().before_step(kind, rate)

    def after_own_step(self) -> None:
        strategy = self.strategy
        if (self.count - self._offset) % strategy.steps == 0 and self.count > self._offset:
            if self._finish_sum is not None:  # of a run that goes on with other settings
                self._finish_round()
            self._start()
        if self._finish_sum is not None and self.count >= self._started + strategy.lag:
            self._finish_round()

    def _start(self) -> None:
        self._started = self.count
        self._sent = [p.detach().clone() for p in self.weights()]
        self._begin_sum()

    def _begin_sum(self) -> None:
        self._left = self._mean.state()
        moved = [b - w for b, w in zip(self.anchors(), self._sent, strict=True)]
        self._finish_sum = self._mean.start(packed(moved) * self.share)

    def _finish_round(self) -> None:
        assert self._finish_sum is not None
        strategy = self.strategy
        anchors, momenta = self.anchors(), self.outer.slots("momentum")
        change = [torch.empty_like(b) for b in anchors]
        unpack(self._finish_sum(), change)
        self._finish_sum = None
        torch._foreach_mul_(momenta, strategy.outer_momentum)
        torch._foreach_add_(momenta, change)
        torch._foreach_add_(change, momenta, alpha=strategy.outer_momentum)
        torch._foreach_add_(anchors, change, alpha=-strategy.outer_lr)
        since = [p.detach() - w for p, w in zip(self.weights(), self._sent, strict=True)]
        late = self.count > self._started
        pairs = zip(anchors, since, strict=True)
        self.replace([b + d if late else b.clone() for b, d in pairs])
        self._sent = []
        if not late:
            self.join_statistics()
        if strategy.optimizer_state == "mean":
            self.join_optimizers()
        self.apart = late

    def rounding(self) -> Tensors:
        return super().rounding() if self._finish_sum is None else self._left

    def under_way(self) -> Tensors:
        if self._finish_sum is None:
            return {}
        sent = {f"sent {i:05}": w for i, w in enumerate(self._sent)}
        return {**sent, "started": torch.tensor(self._started)}

    def load_under_way(self, saved: Tensors) -> None:
        if "started" in saved:
            self._started = int(saved["started"])
            sent = [saved[name] for name in sorted(saved) if name.startswith("sent ")]
            self._sent = [
                torch.empty_like(p).detach().copy_(w)
                for p, w in zip(self.weights(), sent, strict=True)
            ]
            self._begin_sum()


DiLoCo.program = DiLoCoSync
