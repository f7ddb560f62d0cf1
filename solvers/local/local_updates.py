"""Local updates: every block trains on a local loss (Laskin et al., 2012.03837)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, Count, Needs
from hybrid.solvers.base import Program, Setup, Solver, program_of
from hybrid.solvers.local.heads import Head, HeadKind, sizes
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.state import State
from hybrid.solvers.windows import Batch, PhaseStats, Window

PROGRESS_INTERVAL = 8
"""Mini-batches after which the next block reports its progress, if no adjoints come from it.

A block is at most twice as many mini-batches ahead, so that its outputs do not pile up.
"""

CHUNKED = Acts("solver.style is 'chunked'", lambda run: run.solver.style == "chunked")
HEADED = Acts("some block has an auxiliary head", lambda run: run.solver.headed(run.setup.blocks))


@dataclass(frozen=True)
class LocalUpdates(Solver):
    r"""min_{w_k, v_k} phi(g(x_k; v_k), y),   x_k = f_k(lam_k; w_k),   lam_k = x_{k-1}, a constant.

    g is the block's auxiliary head with weights v_k; the last block's is the network's own. The
    composed network has none of the others. The style says which gradients cross a cut:

    greedy        none: a block steps as soon as its input has arrived, and sends nothing down
    overlapping   over one cut: windows of two blocks with stride one have a loss at their end, so
                  block k descends on its own loss and the next block's, whose backward pass it
                  waits for; the first block has no local loss
    chunked       those inside each of `chunks` runs of blocks; a run has the head of its last block
                  and is trained by back-propagation
    """

    name: ClassVar[str] = "local-updates"
    has_auxiliary_weights: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"labels"})

    needs: ClassVar = (
        Needs(
            "solver.chunks is at most the number of blocks",
            lambda run: run.solver.style != "chunked" or run.solver.chunks <= run.setup.blocks,
            "ask for fewer chunks, or more blocks",
            here=lambda run: f"it is {run.solver.chunks} of {run.setup.blocks}",
        ),
        Needs(
            "the network gives one tensor, because an auxiliary head makes one",
            lambda run: not run.setup.several_outputs or not run.solver.headed(run.setup.blocks),
            "choose another solver",
        ),
    )

    style: Literal["greedy", "overlapping", "chunked"] = "greedy"
    """Gradients cross no cut (greedy), one cut (overlapping) or those within a chunk (chunked)."""
    chunks: Annotated[Count, CHUNKED] = 2
    """Number of chunks; 1: back-propagation, the number of blocks: greedy."""
    head: Annotated[HeadKind, HEADED] = "linear"
    """Auxiliary head: linear after pooling, mlp:WIDTH with a hidden layer, or your own function."""

    def check(self, setup: Setup) -> None:
        for k in self.headed(setup.blocks):
            if k + 1 in setup.packed:
                raise ValueError(
                    f"several tensors cross cut {k + 1}, and an auxiliary head works on one: cut "
                    "elsewhere (split.cuts, split.inside=false), or choose another solver"
                )
            if setup.output is not None:
                sizes(setup.shapes[k], setup.output, convolves=False)

    def crosses(self, index: int, count: int) -> bool:
        """Whether an adjoint crosses the cut behind block `index`."""
        if not 0 <= index < count - 1 or self.style == "greedy":
            return False
        chunk = [k * self.chunks // count for k in (index, index + 1)]
        return self.style == "overlapping" or chunk[0] == chunk[1]

    def has_head(self, index: int, count: int) -> bool:
        """Whether the loss of block `index` is its own head's."""
        if index == count - 1 or (self.style == "overlapping" and index == 0):
            return False
        return self.style != "chunked" or not self.crosses(index, count)

    def headed(self, count: int) -> list[int]:
        """The blocks whose loss is their own head's."""
        return [index for index in range(count) if self.has_head(index, count)]


@program_of(LocalUpdates)
class LocalUpdatesProgram(Program):
    """One rank's block and its auxiliary head, if it has one."""

    solver: LocalUpdates

    def begin(self) -> None:
        solver, block = self.solver, self.block
        crosses, trains = solver.crosses, block.index >= block.first_trained
        self._sends_adjoint = crosses(block.index - 1, block.count) and block.sends_adjoint
        self._gets_adjoint = crosses(block.index, block.count) and trains
        self._needs_head = solver.has_head(block.index, block.count)
        # a head's size follows from the first mini-batch
        self._head: Head | None = None
        self._heads_made = False
        self._steps = self._reports = 0

    def train(self, window: Window) -> PhaseStats:
        stats = PhaseStats()
        with stats.timed(self.links):
            if not self._heads_made:
                self._make_head(window.batches[0])
            for _, batch in window.recorded():
                self._train_on(batch, stats)
        return stats

    def drain(self) -> PhaseStats:
        self._wait_for_reports(self._steps // PROGRESS_INTERVAL)
        self._steps = self._reports = 0
        self.links.flush()
        return PhaseStats()

    def state(self) -> State:
        self.drain()
        return State() if self._head is None else State(block=self._head.state())

    def load_state(self, state: State) -> None:
        if state.block and not self._needs_head:
            raise ValueError(
                f"the checkpoint has other auxiliary heads than solver.style={self.solver.style} "
                f"with chunks={self.solver.chunks} asks for: resume with the style and chunks it "
                "was made with"
            )
        if state.block:
            self._head = Head.of_state(self.solver.head, self.block, state.block, self.setup.seed)

    def _train_on(self, batch: Batch, stats: PhaseStats) -> None:
        block, links, down, up = self.block, self.links, self._sends_adjoint, self._gets_adjoint
        overlapping = self.solver.style == "overlapping"
        self._wait_for_reports(self._steps // PROGRESS_INTERVAL - 1)
        lam = batch.images() if block.first else links.from_previous()
        lam = lam.detach().requires_grad_(down)
        x = block.forward(lam, (1, batch.step))
        if not block.last:
            links.to_next(x.detach())
        if block.last or self._head is not None:
            self._local_gradient(x, batch, stats)
        if down and overlapping:
            # of its own loss only; the next block's loss adds to the gradient of lam later
            links.to_previous(block.input_adjoint(lam).clone())
        if up:
            block.backward(x, links.from_next())
        if down and not overlapping:
            links.to_previous(block.input_adjoint(lam))
        block.step("local", batch.learning_rate)
        stats.samples += len(batch)
        stats.steps += 1
        self._steps += 1
        if self._steps % PROGRESS_INTERVAL == 0 and not (block.first or down):
            links.to_previous(torch.zeros(1, device=block.device))

    def _wait_for_reports(self, wanted: int) -> None:
        """Wait until the next block has sent `wanted` reports, if it sends no adjoints."""
        if self.block.last or self._gets_adjoint:
            return
        while self._reports < wanted:
            self.links.from_next()
            self._reports += 1

    def _local_gradient(self, x: Tensor, batch: Batch, stats: PhaseStats) -> None:
        """Add the gradients of the block's own loss; x's graph stays if an adjoint is to come."""
        block = self.block
        out = x if self._head is None else self._head(block, x, (1, batch.step))
        labels = batch.labels()
        result = block.compute_loss(out, labels, block.part_weight(batch, labels))
        loss = result.loss if batch.share == 1 else result.loss * batch.share
        block.backward(loss, retain_graph=self._gets_adjoint)
        stats.count_loss(result)

    def _make_head(self, batch: Batch) -> None:
        """Make the head, whose size follows from a forward pass."""
        block, links = self.block, self.links
        with torch.no_grad(), frozen_statistics(block.module):
            lam = batch.images() if block.first else links.from_previous()
            x = block.forward(lam, (2, batch.step))
            if not block.last:
                links.to_next(x)
        shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else None
        output = links.all_gather(shape)[-1]
        self._heads_made = True
        if self._needs_head and self._head is None:
            assert shape is not None
            assert output is not None
            self._head = Head(self.solver.head, block, shape, output, self.setup.seed)
