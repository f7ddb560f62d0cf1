"""Local SGD: replicas train alone and average their weights every h steps."""

from dataclasses import dataclass
from typing import ClassVar

from hybrid.solvers.acting import Count
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.periodic import PeriodicSync


@dataclass(frozen=True)
class LocalSGD(Strategy):
    r"""Local SGD (Stich, arXiv 1805.09767), h = `steps`:

        each step    w_r <- optimizer step of replica r on the mean gradient over its n_r samples
        every h-th   w_r <- sum_s (n_s / N) w_s,   running statistics likewise

    Every replica has its own optimizer and momentum. A round may last longer than an epoch. With
    h = 1 and plain SGD it is all-reduce, up to rounding.
    """

    name: ClassVar[str] = "local-sgd"

    steps: Count = 8
    """h, local steps between averages of the weights."""


class LocalSGDSync(PeriodicSync):
    """One replica's weights."""

    strategy: LocalSGD

    def after_replica_step(self) -> None:
        if self.count % self.strategy.steps == 0:
            self.agree()


LocalSGD.program = LocalSGDSync
