"""A rank's block, and the rounds that train it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch

from hybrid.cuts.partition import Blocks
from hybrid.links import RankLinks
from hybrid.rounds import optimisers
from hybrid.rounds.rounds import Rounds
from hybrid.settings.config import OptimiserSettings, TrainSettings
from hybrid.training.trace import Trace
from solvers import Backprop, Penalty, Solver
from solvers.base import Block
from solvers.blocks.graphs import StepGraphs
from solvers.layers.projection import leading
from solvers.passes.bubble import BubbleFill
from solvers.passes.pipeline import FillStep, Gaps


def make_block(
    blocks: Blocks,
    rank: int,
    settings: OptimiserSettings,
    device: torch.device,
    train: TrainSettings | None = None,
) -> Block:
    """Block `rank` in training mode on its device, with the optimiser of its exact steps."""
    train = train or TrainSettings()
    module = blocks.module(rank).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = optimisers.make(module, settings)
    optimiser = {"exact": exact, "local": exact}
    dtype = getattr(torch, train.precision)
    last = rank == len(blocks) - 1
    cut_after = None if last else leading(blocks.module(rank + 1))
    if train.compile:
        module.compile(dynamic=False)
    graphs = None
    if train.graphs and device.type == "cuda":
        graphs = StepGraphs(list(module.parameters()))
    return Block(
        module.train(),
        rank,
        len(blocks),
        optimiser,
        device,
        dtype,
        cut_after=cut_after,
        graphs=graphs,
    )


def make_rounds(
    block: Block,
    links: RankLinks,
    solver: Solver,
    correction: Backprop,
    *,
    batch_size: int,
    window: int,
    sweeps: int = 0,
    fill: Sequence[Gaps] | None = None,
    fill_step: FillStep = "added",
    correct_every: int = 1,
    kept: bool = False,
    trace: Trace | None = None,
) -> Rounds:
    """The rounds of one rank, with its own copies of `solver`.

    `sweeps` over windows of `window` mini-batches make the parallel phase, 0 none; `fill` gives
    every block's local work in the gaps of the serial phase, None none. `kept` records outlive a
    round.
    """
    parallel = deepcopy(solver) if sweeps and not solver.exact else None
    if parallel is not None:
        parallel.prepare(block, window * batch_size, sweeps > 1 or kept)
    bubbles = None
    if fill is not None:
        sub_problems = deepcopy(solver)
        if not isinstance(sub_problems, Penalty):
            raise ValueError(
                f"rounds.fill needs sub-problems, which {solver.name!r} has none of: choose "
                "solver augmented-lagrangian or penalty, or rounds.fill=false"
            )
        bubbles = BubbleFill(sub_problems, block, fill[block.index], batch_size, fill_step)
    return Rounds(
        block,
        links,
        correction,
        parallel,
        bubbles,
        correct_every=1 if solver.exact else correct_every,
        return_ratio=getattr(solver, "return_ratio", 0.0),
        trace=trace or Trace(links.rank, links.now),
    )
