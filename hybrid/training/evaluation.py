"""Loss and metrics of the composed network, computed through the links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid.data import Data
from hybrid.links import RankLinks
from solvers.blocks.block import Block
from solvers.blocks.objective import Objective


def measure(
    block: Block, links: RankLinks, data: Data, objective: Objective, batch_size: int = 500
) -> dict[str, float]:
    """Mean loss and metrics of the whole chain of blocks over `data`, the same on every rank."""
    sums: Tensor | None = None
    for ids, out in outputs(block, links, data, batch_size):
        found = torch.stack(objective.measured(out, data.targets(ids).to(block.device)))
        sums = found if sums is None else sums + found
    mine = [] if sums is None else (sums / len(data)).tolist()
    return dict(zip(["loss", *objective.metrics], links.all_gather(mine)[-1], strict=True))


def outputs(
    block: Block, links: RankLinks, data: Data, batch_size: int = 500
) -> Iterator[tuple[Tensor, Any]]:
    """The samples' numbers and the network's outputs, batch by batch, on the last rank.

    All ranks go through it; on the others it gives nothing.
    """
    batches = list(torch.arange(len(data)).split(batch_size))
    if block.first or block.last:
        data.expect(batches, 0, 0)
    # two blocks on threads may share a module without parameters: they change its mode together
    modes = [(module, module.training) for module in block.module.modules()]
    links.all_gather(None)
    block.module.eval()
    links.all_gather(None)
    try:
        yield from _passes(block, links, data, batches)
        links.flush()
        links.all_gather(None)
    finally:
        for module, training in modes:
            module.training = training


def _passes(
    block: Block, links: RankLinks, data: Data, batches: list[Tensor]
) -> Iterator[tuple[Tensor, Any]]:
    with torch.no_grad():
        for number, ids in enumerate(batches):
            if block.first:
                inputs = data.batch(ids, seed=0, epoch=0, augment=False)
                out = block.forward(inputs.to(block.device))
            else:
                out = block.forward(links.from_previous())
            if block.last:
                yield ids, out
            else:
                links.to_next(out)
            if number % 4 == 3:
                # the first block waits for the last, or its outputs would pile up
                links.all_gather(None)
