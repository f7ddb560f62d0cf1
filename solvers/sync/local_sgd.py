"""Local SGD: replicas step by themselves and average their weights every h steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers.checks import check_numbers
from solvers.sync.base import Strategy
from solvers.sync.local import LocalSync
from solvers.sync.reduction import packed, unpack


@dataclass(frozen=True)
class LocalSGD(Strategy):
    r"""Local SGD (Stich, arXiv 1805.09767), h = `steps`:

        each step    w_r <- optimiser step of replica r on the mean gradient over its own samples
        every h-th   w_r <- (1/R) sum_s w_s,   running statistics likewise

    Every replica has an optimiser, whose momentum stays its own within an epoch. At the end of an
    epoch all of it is averaged. With h = 1 and plain SGD it is all-reduce, up to rounding.
    """

    name: ClassVar[str] = "local-sgd"

    steps: int = 8
    """h, steps from one average of the weights to the next."""

    def __post_init__(self) -> None:
        check_numbers(self, at_least_one=("steps",))


class LocalSGDSync(LocalSync):
    """One replica's weights."""

    strategy: LocalSGD

    def stepped(self) -> None:
        if self.count % self.strategy.steps == 0:
            self._average()

    def settle(self) -> None:
        if self.count % self.strategy.steps:
            self._average()

    def _average(self) -> None:
        weights = [p.detach() for p in self.weights()]
        new = [w.clone() for w in weights]
        unpack(self.sum(packed(weights)) / self.peers.replicas, new)
        self.replace(new)
        self.join_statistics()


LocalSGD.program = LocalSGDSync
