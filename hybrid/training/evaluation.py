"""Loss and metrics of the composed network, computed through the links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hybrid.data import Data
from hybrid.links import RankLinks
from hybrid.rounds.report import Scores
from hybrid.solvers.block import Block
from hybrid.solvers.objective import Objective


def measure_network(
    block: Block, links: RankLinks, data: Data, objective: Objective, batch_size: int = 500
) -> dict[str, float]:
    """Mean loss and metrics of the whole chain of blocks over `data`, the same on every rank."""
    place, batches = links.place, torch.arange(len(data)).split(batch_size)
    own = batches[place.replica :: place.replicas]
    scores, measured = Scores(links, objective, objective.accumulated), []
    for ids, out in _outputs(block, links, data, own):
        targets = data.targets(ids).to(block.device)
        measured.append(objective.measured(out, targets))
        scores.add(objective.seen(out, targets))
    if block.last and len(own) < len(batches[:: place.replicas]):
        scores.add(None)  # as often as the first replica
    sums = torch.stack(measured).cpu() if measured else None
    everyone = links.gather((sums, scores.values()))
    means = {}
    if everyone is not None:
        lasts = [sums for sums, _ in everyone if sums is not None]
        # each replica has every R-th mini-batch: added up in their order, as one would
        in_order = [lasts[n % place.replicas][n // place.replicas] for n in range(len(batches))]
        totals = reduce(torch.add, in_order)
        found = (totals[:, 0] / totals[:, 1].clamp_min(1)).tolist()
        means = dict(zip(objective.sums, found, strict=True)) | everyone[links.size - 1][1]
    known = links.broadcast(means)
    return {name: known[name] for name in ("loss", *objective.metrics)}


def _outputs(
    block: Block, links: RankLinks, data: Data, batches: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Any]]:
    """The samples' numbers and the network's outputs, batch by batch, on the last block.

    All ranks go through it; on the others it gives nothing.
    """
    if block.first or block.last:
        data.expect(list(batches), 0, 0)
    # two blocks on threads may share a module without parameters, so they change its mode together
    modes = [(module, module.training) for module in block.module.modules()]
    links.all_gather(None)
    block.module.eval()
    links.all_gather(None)
    try:
        with torch.no_grad():
            for number, ids in enumerate(batches):
                if block.first:
                    inputs = data.batch(ids, seed=0, epoch=0, augment=False).to(block.device)
                else:
                    inputs = links.from_previous()
                out = block.forward(inputs)
                if block.last:
                    yield ids, out
                else:
                    links.to_next(out)
                if number % 4 == 3:
                    # the first block waits for the last one, or its outputs would pile up
                    links.all_gather(None)
        links.flush()
        links.all_gather(None)
    finally:
        for module, training in modes:
            module.training = training
