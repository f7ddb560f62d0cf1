"""Accuracy of the composed network, computed through the links."""

from __future__ import annotations

import torch

from hybrid.data import Dataset
from hybrid.links import RankLinks
from solvers.blocks.block import Block


def accuracy(block: Block, links: RankLinks, data: Dataset, batch_size: int = 500) -> float:
    """Share of `data` the whole chain of blocks classifies correctly; the same on every rank."""
    correct = 0
    was_training = block.module.training
    block.module.eval()
    with torch.no_grad():
        for number, ids in enumerate(torch.arange(len(data)).split(batch_size)):
            if block.first:
                images = data.batch(ids, seed=0, epoch=0, augment=False)
                out = block.forward(images.to(block.device))
            else:
                out = block.forward(links.from_previous())
            if block.last:
                labels = data.targets(ids).to(block.device)
                correct += int((out.argmax(1) == labels).sum())
            else:
                links.to_next(out)
            if number % 4 == 3:
                # the first block waits for the last, or its outputs would pile up
                links.all_gather(None)
    links.flush()
    block.module.train(was_training)
    return links.all_gather(correct)[-1] / len(data)
