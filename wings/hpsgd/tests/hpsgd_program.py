"""Two replicas that have both sent their sums before either asks for the total."""

import torch
from torch import nn

from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.solvers.block import Block
from hybrid_hpsgd import HPSGD


def fast_link(links):
    """Steps of each round between sending a sum and taking it."""
    module = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    block = Block(module, 0, 1, {"exact": optimizer, "local": optimizer})
    sync = block.sync = HPSGD(steps=8, commit="ready").start(block, links.peers, 0.5)
    waits, since = [], 0
    for _ in range(48):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        links.all_gather_grid(None)  # no replica asks before the other has sent
        waiting = sync._sum is not None
        since += 1
        block.step("exact", 0.1)
        if waiting and sync._landed:
            waits.append(since)
        if sync.count % 8 == 0:
            since = 0
    block.keep_tested_weights()
    same = links.all_gather_grid([p.tolist() for p in module.parameters()])
    assert same[0] == same[1]
    return waits


def on_ranks(comm):
    links = MpiLinks(Start.of(comm, 2))
    try:
        return fast_link(links)
    finally:
        links.close()
