"""FDG: DDG with a tick of slack for every message (Zhuang et al., github ZHUANGHP/FDG)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from hybrid.solvers.acting import ShareOrWhole
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.delayed.ddg import DDG


@dataclass(frozen=True)
class FDG(DDG):
    r"""Fully decoupled training with delayed gradients (Zhuang et al., github ZHUANGHP/FDG).

    `DDG` with d_k = 2 (K-1-k), so that a message has a tick to arrive in, and adjoints that shrink
    by b at every hop, since what comes from afar is older.
    """

    name: ClassVar[str] = "fdg"

    gradient_shrinking: ShareOrWhole = 1.0
    """Factor b of a gradient at every cut it crosses, in (0, 1]."""

    def delay(self, index: int, count: int) -> int:
        return 2 * super().delay(index, count)

    @property
    def shrink(self) -> float:
        return self.gradient_shrinking

    def lossless(self, formats: bool = False) -> Delayed:
        return DDG.lossless(replace(self, gradient_shrinking=1.0), formats)
