"""DDG: delayed gradients at stashed weights (Huo et al., arXiv 1804.10574)."""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Annotated, ClassVar

from torch import Tensor, nn

from hybrid.solvers.acting import SEVERAL_BLOCKS, Needs
from hybrid.solvers.base import GraphBytes
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.engine.policies import BackwardPolicy, StashWeights
from hybrid.solvers.engine.unstashed import KeepActivations
from hybrid.solvers.numerics.weights import trained_bytes

DELAYS = 0.0, 3 / 8, 7 / 8, 15 / 8
"""Delays of the first block, in steps, at which it was measured what a step is worth."""
LOST = {
    "sgd": (0.0, 0.09, 0.20, 0.32),
    "muon": (0.0, 0.08, 0.14, 0.34),
    "soap": (0.0, 0.05, 0.08, 0.33),
    "adamw": (0.0, 0.13, 0.24),
}
"""By optimizer: the share of an exact step's progress that each of `DELAYS` costs.

It is the share of the epochs by which a flushed training could be shorter for the same accuracy, in
short trainings at high learning rates, where the loss is largest
(docs/benchmarks/delays/tolerance.md). Other optimizers count as adamw, which loses most.
"""

FLOAT32 = Needs(
    "train.precision is 'float32', since autocast keeps a copy of the weights in every graph",
    lambda run: run.train.precision == "float32",
    "keep the stash",
)
STASHES = Needs(
    "solver.stash is true, since activations that are computed again come from the newest weights",
    lambda run: run.solver.stash,
    "leave one of them out, or choose a solver that replays forward passes",
)


@dataclass(frozen=True)
class DDG(Delayed):
    r"""Decoupled parallel back-propagation with delayed gradients (Huo et al., arXiv 1804.10574).

    `Delayed` with d_k = K-1-k; the gradient of a micro-batch is taken at the weights that its
    forward pass used. Block k keeps d_k graphs, and ceil(d_k / m) versions of its weights beside
    the newest, each shared by the micro-batches that used it. With `recompute` it keeps d_k inputs
    and one graph, which it makes again at that version before the backward pass, with the same bits
    (Chen et al., arXiv 1604.06174).

    Without `stash` it keeps the d_k graphs and no older weights: where a backward pass needs a
    weight, it takes the newest, with the activations as the forward pass has left them (PACI, arXiv
    2606.07881; AsyncPP, arXiv 2505.01099). That is the gradient of no function, and 1F1B's memory.
    """

    name: ClassVar[str] = "ddg"
    takes_local_work: ClassVar[bool] = True

    stash: Annotated[bool, SEVERAL_BLOCKS, FLOAT32] = True
    """Weight stashing: backward passes use their forward pass's weights; false: the newest."""
    recompute: Annotated[bool, SEVERAL_BLOCKS, STASHES] = False
    """Gradient checkpointing: keep only block inputs and recompute; same bits."""

    @property
    def replays(self) -> bool:
        return self.recompute

    def policy(self, block: Block) -> BackwardPolicy:
        return StashWeights(block, self.recompute) if self.stash else KeepActivations(block)

    def progress(self, count: int, size: int, optimizer: str = "sgd") -> float | None:
        lost, late = LOST.get(optimizer, LOST["adamw"]), self.steps_late(0, count, size)
        for (a, low), (b, high) in pairwise(zip(DELAYS, lost, strict=False)):
            if a <= late <= b:
                return 1 - low - (high - low) * (late - a) / (b - a)
        return None

    def versions(self, index: int, count: int, size: int) -> int:
        if not self.stash:
            return 0
        return ceil(self.delay(index, count) / self.num_micro_batches(size, count))

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, d = self.first_part(lam, count), self.delay(index, count)
        version = trained_bytes(module)
        older = self.versions(index, count, len(lam)) * version
        if self.recompute:
            return graph(module, x) + d * x.nbytes + older
        return (d + 1) * graph(module, x) + older
