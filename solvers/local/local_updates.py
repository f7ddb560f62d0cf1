"""Local updates: gradients stop at cuts, every block has a loss (Laskin et al., 2012.03837)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from solvers.acting import Acts, Count, Needs
from solvers.base import Program, Setup, Solver, program_of
from solvers.blocks import heads
from solvers.blocks.buffers import frozen_statistics
from solvers.blocks.heads import Head, HeadKind
from solvers.state import State
from solvers.windows import Batch, PhaseStats, Window

Style = Literal["greedy", "overlapping", "chunked"]

AHEAD = 8
"""Where nothing else comes back, the next block tells every so many mini-batches how far it is: a
block is at most two such counts ahead, or its outputs would pile up."""

CHUNKED = Acts("solver.style is 'chunked'", lambda run: run.solver.style == "chunked")
HEADED = Acts("some block has an auxiliary head", lambda run: run.solver.headed(run.setup.blocks))


@dataclass(frozen=True)
class LocalUpdates(Solver):
    r"""min_{w_k, v_k} phi(g(x_k; v_k), y),   x_k = f_k(lam_k; w_k),   lam_k = x_{k-1}, a constant.

    g is the block's auxiliary head with weights v_k; the last block's is the network's own. The
    composed network has none of the others. Which gradients cross a cut is the style:

    greedy        none: a block steps as soon as its input has come, and sends nothing down
    overlapping   one cut: windows of two blocks with stride one, the loss at the end of each, so
                  block k descends on its own loss and the next block's; the first has none of its
                  own. It waits for the next block's backward pass
    chunked       those inside one of `chunks` runs of blocks, each of which has the head of its
                  last block and is trained by back-propagation
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

    style: Style = "greedy"
    """Which gradients cross a cut: none, one cut's, or those inside a chunk."""
    chunks: Annotated[Count, CHUNKED] = 2
    """Runs of blocks that are trained as one (chunked); 1: back-propagation, K: greedy."""
    head: Annotated[HeadKind, HEADED] = "linear"
    """Auxiliary head, behind a mean over pixels: linear, or mlp:WIDTH with a hidden layer."""

    def check(self, setup: Setup) -> None:
        heads.check_cuts(setup, [k + 1 for k in self.headed(setup.blocks)], "choose another solver")

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
        self._down = solver.crosses(block.index - 1, block.count)
        self._up = solver.crosses(block.index, block.count)
        self._needs_head = solver.has_head(block.index, block.count)
        # the first mini-batch tells a head's size
        self._head: Head | None = None
        self._begun = False
        self._visits = self._heard = 0

    def train(self, window: Window) -> PhaseStats:
        stats = PhaseStats()
        with stats.timed(self.links.now):
            if not self._begun:
                self._begin(window.batches[0])
            for _, batch in window.recorded():
                self._visit(batch, stats)
        return stats

    def drain(self) -> PhaseStats:
        self._hear(self._visits // AHEAD)
        self._visits = self._heard = 0
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
            self._head = Head.of_state(self.solver.head, self.block, state.block)

    def _visit(self, batch: Batch, stats: PhaseStats) -> None:
        block, links, down, up = self.block, self.links, self._down, self._up
        overlapping = self.solver.style == "overlapping"
        self._hear(self._visits // AHEAD - 1)
        lam = batch.images() if block.first else links.from_previous()
        lam = lam.detach().requires_grad_(down)
        x = block.forward(lam, (1, batch.step))
        if not block.last:
            links.to_next(x.detach())
        if block.last or self._head is not None:
            self._descend(x, batch, stats)
        if down and overlapping:
            # its own loss alone: what comes from above stops here, and adds to lam's gradient
            links.to_previous(block.input_adjoint(lam).clone())
        if up:
            block.backward(x, links.from_next())
        if down and not overlapping:
            links.to_previous(block.input_adjoint(lam))
        block.step("local", batch.learning_rate)
        stats.samples += len(batch)
        stats.steps += 1
        self._visits += 1
        if self._visits % AHEAD == 0 and not (block.first or down):
            links.to_previous(torch.zeros(1, device=block.device))

    def _hear(self, wanted: int) -> None:
        """Wait until the next block, if it sends nothing else, has done `wanted` times AHEAD."""
        if self.block.last or self._up:
            return
        while self._heard < wanted:
            self.links.from_next()
            self._heard += 1

    def _descend(self, x: Tensor, batch: Batch, stats: PhaseStats) -> None:
        """Gradients of the block's own loss; where it comes again, x's graph stays."""
        block = self.block
        found = block.classify(x if self._head is None else self._head(block, x), batch.labels())
        loss = found.loss if batch.share == 1 else found.loss * batch.share
        block.backward(loss, retain_graph=self._up)
        stats.classified(found)

    def _begin(self, batch: Batch) -> None:
        """Make the heads: a forward pass tells their sizes."""
        block, links = self.block, self.links
        with torch.no_grad(), frozen_statistics(block.module):
            lam = batch.images() if block.first else links.from_previous()
            x = block.forward(lam, (2, batch.step))
            if not block.last:
                links.to_next(x)
        mine = tuple(x.shape[1:]) if isinstance(x, Tensor) else None
        output = links.all_gather(mine)[-1]
        self._begun = True
        if self._needs_head and self._head is None:
            assert mine is not None
            assert output is not None
            self._head = Head(self.solver.head, block, mine, output)
