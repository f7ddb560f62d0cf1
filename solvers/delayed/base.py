"""What all methods with delayed gradients share: their mathematics, delays and micro-batches."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar

from torch import Tensor, nn

from hybrid.solvers.acting import CountOrZero, Needs, NotNegative
from hybrid.solvers.base import GraphBytes, Setup, Solver, program_of
from hybrid.solvers.engine.engine import Engine, Scheduled
from hybrid.solvers.engine.schedule import Action, Span, never_flushed, table
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.wire import Adjoints, Messages, Wire, comparable

LONGEST_DELAY = 0.5
"""Steps by which the first block's gradients may be late where m is not set."""
SHORTEST_PART = 16
"""Samples of a micro-batch, at least: BatchNorm's statistics and a core's rate suffer below."""

NOT_COMPILED = Needs(
    "train.compile is false, because it goes through its blocks unit by unit",
    lambda run: not run.setup.compiled,
    "leave train.compile out, or choose another solver",
)


@dataclass(frozen=True)
class Delayed(Scheduled, Solver):
    r"""Mini-batches go through the blocks in m micro-batches. At its n-th tick, block k computes

        lam_k = x_{k-1} of micro-batch n,   x_k = f_k(lam_k; w_k)               forward, sent up
        p_k = b (d x_k / d lam_k)^T p_{k+1}  of micro-batch n - d_k             backward, sent down
        w_k <- optimizer step at the learning rate eta_t with the sum of (d x_k / d w_k)^T p_{k+1}
               over the micro-batches of mini-batch t, after the backward pass of its last

    where d_k is fixed, so the result does not depend on timing. A late step is made at the rate of
    the mini-batch whose gradient it is, eta_t on every block, and not at that of the mini-batch
    that goes forward meanwhile. The pipeline is never flushed: a micro-batch takes one tick,
    whatever K is. The gradient of a mini-batch is d_k / m steps late: the forward passes of its
    first d_k micro-batches came before the newest step (before the newest two, if d_k > m, ...).
    Block K-1 has d = 0 and works as back-propagation does. K = 1 is the pipelined pass with as many
    micro-batches, and with m = 1 it is plain back-propagation, bit for bit.

    d_k = K-1-k is one forward, one backward: a block has as many graphs under way as in a flushed
    pipeline, and waits for its neighbor if a message takes long (PipeDream, arXiv 1806.03377, steps
    in this order after every micro-batch). d_k = 2 (K-1-k) gives every message one tick of slack.
    The pipeline is drained at the end of an epoch and before a serial correction: all backward
    passes under way are completed, no forward pass begins, and no gradient is lost.
    """

    cuts_inside: ClassVar[bool] = True
    sums_mini_batches: ClassVar[bool] = True
    """Whether a step is on the sum over a mini-batch, which is exact where weights are equal."""

    micro_batches: CountOrZero = 0
    """m, micro-batches per mini-batch: more make delays shorter. 0: the smallest power of
    two with which no gradient is over half a step late, at least 16 samples each."""
    messages: Messages = "float32"
    """Codec of activations between blocks: float32, bfloat16, float16, int8, int6,
    int4 or int3."""
    adjoints: Adjoints = ""
    """Codec of their adjoints, which bear fewer bits; empty: that of `messages`."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of each block's gradient (not in serial rounds); 0: no clipping."""

    def delay(self, index: int, count: int) -> int:
        return count - 1 - index

    def num_micro_batches(self, size: int, count: int) -> int:
        if self.micro_batches:
            return min(self.micro_batches, size)
        m = 1
        while self.delay(0, count) > LONGEST_DELAY * m and size >= 2 * m * SHORTEST_PART:
            m *= 2
        return m

    def versions(self, index: int, count: int, size: int) -> int:
        """Most older versions of its weights that block `index` of `count` keeps at once."""
        return 0

    def schedule(
        self, index: int, count: int, span: Span, budget: LocalBudget | None = None
    ) -> list[Action]:
        return never_flushed(self.delay(index, count), span, budget)

    def check(self, setup: Setup) -> None:
        """Refuse delays with which the blocks would wait for each other without end."""
        m = self.num_micro_batches(setup.batch_size, setup.blocks)
        span, count = Span.of([m, m]), setup.blocks
        table([self.schedule(k, count, span) for k in range(count)])

    def wire(self) -> Wire:
        return Wire(self.messages, self.adjoints)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        d, x = self.delay(index, count), self.first_part(lam, count)
        return graph(module, x) + d * x.nbytes

    def first_part(self, lam: Tensor, count: int) -> Tensor:
        """The first, and largest, micro-batch of a mini-batch."""
        size = ceil(len(lam) / self.num_micro_batches(len(lam), count))
        return lam.detach()[:size].clone().requires_grad_(lam.requires_grad)

    def lossless(self, formats: bool = False) -> "Delayed":
        """The same, whose gradients at equal weights are exact; `formats`: but for rounding."""
        plain: dict[str, Any] = comparable(self.messages, self.adjoints, formats)
        return replace(self, clip_norm=0.0, **plain)


@program_of(Delayed)
class DelayedProgram(Engine):
    """One rank's passes and steps, each on its block's gradient."""

    solver: Delayed

    def step(self, part: MicroBatch) -> None:
        """Step with the gradient of the mini-batch that a micro-batch completes."""
        self.block.step("local", part.learning_rate, self.solver.clip_norm)
