"""Features Replay: delayed gradients at the newest weights, by replay (Huo et al., 1807.04511)."""

from dataclasses import dataclass
from typing import ClassVar

from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.engine.policies import BackwardPolicy, Replay


@dataclass(frozen=True)
class FeaturesReplay(Delayed):
    r"""Features Replay (Huo et al., arXiv 1807.04511).

    `Delayed` with d_k = K-1-k; a block keeps the inputs of d_k micro-batches, but no graph and no
    older weights. The backward pass first replays the forward pass of micro-batch n - d_k at the
    newest weights. The replay updates BatchNorm's running statistics; the first pass does not.
    """

    name: ClassVar[str] = "features-replay"
    takes_local_work: ClassVar[bool] = True
    replays = True

    def policy(self, block: Block) -> BackwardPolicy:
        return Replay(block)
