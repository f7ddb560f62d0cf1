"""All-reduce: every step is on the gradient of the whole mini-batch, on all replicas alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers.checks import check_choices
from solvers.state import State, entries
from solvers.sync.base import Strategy, Sync, statistics
from solvers.sync.messages import MessageFormat
from solvers.sync.reduction import Reduction, packed, unpack


@dataclass(frozen=True)
class AllReduce(Strategy):
    r"""Synchronous data parallelism. Before a step, on every replica:

        g <- sum_r g_r,   g_r = (n_r / N) times the mean gradient over the n_r samples of replica r

    in replica order, so that one rank which accumulates R micro-batches in that order has the same
    bits. Running statistics become their mean over replicas at the same moment: after every step
    all replicas are equal, weights, optimisers and statistics.
    """

    name: ClassVar[str] = "all-reduce"
    exact: ClassVar[bool] = True

    messages: MessageFormat = "float32"
    """Number format of gradients between replicas: float32, or bfloat16, int8 with feedback."""

    def __post_init__(self) -> None:
        check_choices(self)


class AllReduced(Sync):
    """One rank's gradients and statistics, summed."""

    strategy: AllReduce

    def begin(self) -> None:
        kind = self.strategy.messages
        self._gradients = {kind: Reduction(self.peers, self.strategy.messages) for kind in _KINDS}
        # too small to be worth rounding, and their errors would not average out
        self._statistics = Reduction(self.peers) if kind != "float32" else None

    def before_step(self, kind: str, rate: float) -> bool:
        gradients = [p.grad for p in self.block.stepping(kind) if p.grad is not None]
        moved = statistics(self.block.module) if kind != "auxiliary" else []
        vector = packed(moved) / self.peers.replicas
        if self._statistics is None:
            both = [*gradients, *moved]
            if both:
                joined = packed([*gradients, vector])
                unpack(self._gradients[kind].start(joined)(), both)
            return True
        finish = self._statistics.start(vector)
        if gradients:
            unpack(self._gradients[kind].start(packed(gradients))(), gradients)
        unpack(finish(), moved)
        return True

    def state(self) -> State:
        return State(
            flight={
                f"{kind}/{name}": left
                for kind, reduction in self._gradients.items()
                for name, left in reduction.state().items()
            }
        )

    def load_state(self, state: State) -> None:
        for kind, reduction in self._gradients.items():
            reduction.load_state(entries(state.flight, f"{kind}/"))


AllReduce.program = AllReduced
_KINDS = ("exact", "local", "auxiliary")
