"""Random small networks and a way to run a program on every block."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from hybrid.cuts.partition import Blocks, split
from hybrid.links import RankLinks, run_threads
from solvers import Backprop, Batch, Block, Penalty, Solver, Window
from solvers.layers.projection import leading


@dataclass(frozen=True)
class Fixed:
    """A source that holds its samples."""

    x: Tensor
    y: Tensor

    def images(self, ids: Tensor) -> Tensor:
        return self.x[ids]

    def labels(self, ids: Tensor) -> Tensor:
        return self.y[ids]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.bn(self.conv(x)))


@dataclass
class Problem:
    """A random float64 network of `units` residual units, cut into blocks, and its mini-batches."""

    blocks: Blocks
    batches: list[Batch]

    def build(self, index: int, lr: float = 0.1, momentum: float = 0.9) -> Block:
        module = self.blocks.module(index).train()
        sgd = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        last = index == len(self.blocks) - 1
        after = None if last else leading(self.blocks.module(index + 1))
        optimisers = {"exact": sgd, "local": sgd}
        return Block(module, index, len(self.blocks), optimisers, cut_after=after)

    def window(self, solver: Solver | None = None, sweeps: int = 1) -> Window:
        return Window(self.batches, sweeps, solver.recorder if solver else None)

    def single_precision(self) -> Problem:
        """The same in float32."""
        self.blocks.model.float()
        source = self.batches[0].source
        assert isinstance(source, Fixed)
        single = Fixed(source.x.float(), source.y)
        return replace(self, batches=[replace(b, source=single) for b in self.batches])

    def frozen(self) -> Problem:
        """The same with a learning rate of zero."""
        return replace(self, batches=[replace(b, learning_rate=0.0) for b in self.batches])

    @property
    def samples(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def on_every_block(self, program: Callable[[Block, RankLinks], Any]) -> list[Any]:
        """Run `program(block, links)` on all ranks, each a thread."""
        return run_threads(len(self.blocks), lambda links: program(self.build(links.rank), links))

    def plain_gradients(self, batch: Batch) -> dict[str, Tensor]:
        """The batch-mean loss's gradients of the whole network, without blocks."""
        model = self.blocks.model
        model.zero_grad()
        nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found


def make_problem(
    seed: int, units: int, cuts: list[int], batch: int, batches: int = 1, width: int = 3
) -> Problem:
    torch.manual_seed(seed)
    stem = nn.Conv2d(1, width, 3, padding=1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
    body = [Residual(width) for _ in range(units)]
    model = nn.Sequential(stem, *body, *head).double()
    x = torch.randn(batch * batches, 1, 6, 6, dtype=torch.float64)
    y = torch.randint(0, 4, (batch * batches,))
    ids = torch.arange(batch * batches).split(batch)
    source = Fixed(x, y)
    blocks = split(model, cuts=[str(c) for c in cuts])
    return Problem(blocks, [Batch(i, 0.1, source) for i in ids])


def recorded(
    problem: Problem, solver: Solver, block: Block, links: RankLinks, sweeps: int = 1
) -> Any:
    """A rank's copy of `solver`, its auxiliary variables started by an exact pass."""
    mine = deepcopy(solver)
    mine.prepare(block, problem.samples, sweeps > 1)
    Backprop().observe(block, links, problem.window(mine, sweeps))
    return mine


def kept_window(problem: Problem, solver: Penalty, sweeps: int = 1) -> Window:
    return Window(problem.batches, sweeps, solver.recorder, kept=True)


def started(problem: Problem, solver: Penalty, block: Block, links: RankLinks) -> Any:
    """A rank's copy of `solver`, its auxiliary variables started by a forward pass."""
    mine = deepcopy(solver)
    mine.prepare(block, problem.samples, True)
    Backprop().propagate(block, links, problem.window(mine))
    return mine


def gradients(block: Block) -> dict[str, Tensor]:
    """The gradients at hand under their global names."""
    return {
        block.module.global_name(name): p.grad.clone()
        for name, p in block.module.named_parameters()
        if p.grad is not None
    }


@st.composite
def problems(draw: st.DrawFn, batches: int = 1, min_blocks: int = 2) -> Problem:
    """Random depth, cuts and batch size."""
    units = draw(st.integers(2, 5))
    cuts = st.lists(st.integers(1, units), min_size=min_blocks - 1, max_size=4, unique=True)
    return make_problem(
        seed=draw(st.integers(0, 10_000)),
        units=units,
        cuts=sorted(draw(cuts)),
        batch=draw(st.integers(2, 7)),
        batches=batches,
    )
