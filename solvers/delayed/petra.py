"""PETRA: delayed gradients in reversible blocks, without a stash (Rivaud et al., 2406.02052)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Needs
from hybrid.solvers.base import GraphBytes
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import NOT_COMPILED, Delayed
from hybrid.solvers.engine.policies import BackwardPolicy
from hybrid.solvers.engine.reversal import Reverse, segments
from hybrid.solvers.layers.branches import Reversible
from hybrid.solvers.numerics.buffers import frozen_statistics


@dataclass(frozen=True)
class Petra(Delayed):
    r"""`Delayed` with d_k = 2 (K-1-k); all at the weights of the tick:

        x_k = f_k(x_{k-1}; w_k)                                   forward, sent up, nothing kept
        xt_{k-1} = f_k^{-1}(xt_k; w_k)                            the input, but for drift
        p_k = (d f_k / d x)^T p_{k+1},  dw_k  at xt_{k-1}         sent down with xt_{k-1}
        w_k <- optimizer step with the sum of dw_k over a mini-batch's micro-batches

    Units that are not reversible (stem, downsampling, head) keep their last d_k inputs in a queue.
    So a block's memory does not grow with the number of its reversible units. The backward pass
    goes unit by unit. It updates BatchNorm's running statistics; the forward pass does not. The
    last block does forward, loss and backward in one tick by ordinary back-propagation, so K = 1 is
    plain training bit for bit.
    """

    name: ClassVar[str] = "petra"
    cuts_inside: ClassVar[bool] = False
    returns_inputs: ClassVar[bool] = True

    needs: ClassVar = (
        Needs(
            "one tensor at a time goes into a block, because it turns units round so",
            lambda run: not run.setup.bundled,
            "leave units whole (split.inside=false), or choose another solver",
        ),
        NOT_COMPILED,
    )

    def delay(self, index: int, count: int) -> int:
        return 2 * super().delay(index, count)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, queued, largest = self.first_part(lam, count), 0, 0
        if index == count - 1:
            return graph(module, x)
        with torch.no_grad(), frozen_statistics(module):
            for part in segments(module):
                if isinstance(part, Reversible):
                    largest = max(largest, graph(part.residual, x.chunk(2, dim=1)[0]))
                else:
                    largest = max(largest, graph(part, x))
                    queued += x.nbytes
                x = part(x)
        return largest + self.delay(index, count) * queued

    def policy(self, block: Block) -> BackwardPolicy:
        return Reverse(block)
