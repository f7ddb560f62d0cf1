"""Local updates: gradients stop at cuts, every block has a loss (Laskin et al., 2012.03837)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from solvers.base import Batch, Block, Links, PhaseStats, Solver, Window
from solvers.blocks.norms import frozen_statistics
from solvers.layers import heads
from solvers.layers.heads import Head

Style = Literal["greedy", "overlapping", "chunked"]

AHEAD = 8
"""Where nothing else comes back, the next block tells every so many mini-batches how far it is: a
block is at most two such counts ahead, or its outputs would pile up."""


@dataclass
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
    standalone: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    style: Style = "greedy"
    """Which gradients cross a cut: none, one cut's, or those inside a chunk."""
    chunks: int = 2
    """Runs of blocks that are trained as one (chunked)."""
    head: str = "linear"
    """Auxiliary head: linear (behind a mean over pixels), or mlp:WIDTH."""

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(f"style is {self.style!r}; choose one of {', '.join(get_args(Style))}")
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks}; it must be at least 1")
        heads.check(self.head)

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:
        """No head yet: the first mini-batch tells its size."""
        if self.style == "chunked" and self.chunks > block.count:
            raise ValueError(f"chunks is {self.chunks}, of {block.count} blocks: ask for fewer")
        self._head: Head | None = None
        self._begun = False
        self._visits = self._heard = 0

    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        stats = PhaseStats()
        with stats.timed(links):
            if not self._begun:
                self._begin(block, links, window.batches[0])
            for _, batch in window.recorded():
                self._visit(block, links, batch, stats)
        return stats

    def drain(self, block: Block, links: Links) -> None:
        self._hear(block, links, self._visits // AHEAD)
        self._visits = self._heard = 0
        links.flush()

    def flight_state(self, block: Block, links: Links) -> dict[str, Tensor]:
        self.drain(block, links)
        if not self._begun:
            return {}
        begun = {"begun": torch.tensor(1)}
        return begun if self._head is None else begun | self._head.state()

    def load_flight_state(self, block: Block, state: dict[str, Tensor]) -> None:
        self._begun = bool(state)
        if self._begun and ("sizes" in state) != self._has_head(block):
            raise ValueError(
                f"the checkpoint has other auxiliary heads than solver.style={self.style} with "
                f"chunks={self.chunks} asks for: resume with the style and chunks it was made with"
            )
        if "sizes" in state:
            self._head = Head.of_state(self.head, block, state)

    def _visit(self, block: Block, links: Links, batch: Batch, stats: PhaseStats) -> None:
        down = self._crosses(block.index - 1, block.count)
        self._hear(block, links, self._visits // AHEAD - 1)
        lam = batch.images() if block.first else links.from_previous()
        lam = lam.detach().requires_grad_(down)
        x = block.forward(lam)
        if not block.last:
            links.to_next(x.detach())
        up = self._crosses(block.index, block.count)
        if block.last or self._head is not None:
            self._descend(block, x, batch, stats, again=up)
        if up and self.style == "overlapping" and down:
            # its own loss alone: what comes from above stops here
            links.to_previous(self._adjoint(block, lam))
        if up:
            block.backward(x, links.from_next())
        if down and not (up and self.style == "overlapping"):
            links.to_previous(self._adjoint(block, lam))
        if self._head is not None:
            self._head.step(block, batch.learning_rate)
        block.step("local", batch.learning_rate)
        stats.samples += len(batch)
        stats.steps += 1
        self._visits += 1
        if self._visits % AHEAD == 0 and not (block.first or down):
            links.to_previous(torch.zeros(1, device=block.device))

    def _hear(self, block: Block, links: Links, wanted: int) -> None:
        """Wait until the next block, if it sends nothing else, has done `wanted` times AHEAD."""
        if block.last or self._crosses(block.index, block.count):
            return
        while self._heard < wanted:
            links.from_next()
            self._heard += 1

    def _descend(
        self, block: Block, x: Tensor, batch: Batch, stats: PhaseStats, again: bool
    ) -> None:
        """Gradients of the block's own loss; `again`: the graph is needed once more."""
        labels = batch.labels()
        out = x if self._head is None else self._head(block, x)
        loss = block.loss(out, labels)
        scaled = loss * block.loss_scale
        scaled.backward(retain_graph=again)
        if block.last:
            stats.classified(out, labels)
        stats.losses.append(loss.detach())

    def _adjoint(self, block: Block, lam: Tensor) -> Tensor:
        p = block.input_adjoint(lam)
        assert p is not None
        return p.clone()

    def _crosses(self, index: int, count: int) -> bool:
        """Whether an adjoint crosses the cut behind block `index`."""
        if not 0 <= index < count - 1 or self.style == "greedy":
            return False
        chunk = [k * self.chunks // count for k in (index, index + 1)]
        return self.style == "overlapping" or chunk[0] == chunk[1]

    def _begin(self, block: Block, links: Links, batch: Batch) -> None:
        """Make the heads: a forward pass tells their sizes."""
        with torch.no_grad(), frozen_statistics(block.module):
            x = block.forward(batch.images() if block.first else links.from_previous())
            if not block.last:
                links.to_next(x)
        classes = links.all_gather(x.shape[1])[-1]
        self._begun = True
        if self._has_head(block):
            self._head = Head(self.head, block, x.shape[1], classes)

    def _has_head(self, block: Block) -> bool:
        """Whether the block's loss is its own head's."""
        if block.last or (self.style == "overlapping" and block.first):
            return False
        return self.style != "chunked" or not self._crosses(block.index, block.count)
