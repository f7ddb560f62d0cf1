"""Micro-batches: parts of a mini-batch, as one block sees them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hybrid.solvers.block import Block
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.windows import Batch, Record


class MicroBatch(NamedTuple):
    """A run of a mini-batch's samples, as one block sees it."""

    step: int
    """The step of its mini-batch."""
    number: int
    """Its place among the mini-batch's micro-batches."""
    start: int
    """Its first sample's place in the mini-batch."""
    stop: int
    """The place after its last sample."""
    size: int
    """Samples of the mini-batch on all replicas."""
    samples: int
    """Samples of the mini-batch on this replica."""
    images: Tensor | None = None
    """On the first block: (stop - start, C, H, W)."""
    labels: Tensor | None = None
    """On the last block: (stop - start,)."""
    weight: Tensor | None = None
    """There, if its loss weighs samples: see `Block.part_weight`."""
    learning_rate: float = 0.0
    """Of the step of its mini-batch."""

    @property
    def key(self) -> Key:
        """The key of its random numbers."""
        return (0, self.step, self.number)

    @property
    def share(self) -> float:
        """Its weight in the mini-batch's mean."""
        return (self.stop - self.start) / self.size

    @property
    def replica_share(self) -> float:
        """Its weight in the mean over this replica's samples."""
        return (self.stop - self.start) / self.samples

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its mini-batch."""
        return self.stop == self.samples


def split_into_micro_batches(batch: Batch, count: int, block: Block) -> list[MicroBatch]:
    """A mini-batch in `count` parts whose sizes differ by at most one; fewer if it is smaller."""
    sizes = [len(ids) for ids in batch.ids.tensor_split(min(count, len(batch)))]
    images = batch.images().split(sizes) if block.first else [None] * len(sizes)
    labels: Sequence[Tensor | None] = [None] * len(sizes)
    weights: Sequence[Tensor | None] = labels
    if block.last:
        targets = batch.labels()
        labels, weights = targets.split(sizes), block.part_weights(batch, targets, sizes)
    parts, start = [], 0
    for i, (n, x, y, w) in enumerate(zip(sizes, images, labels, weights, strict=True)):
        rows, of = (start, start + n), (batch.size, len(batch))
        parts.append(MicroBatch(batch.step, i, *rows, *of, x, y, w, batch.learning_rate))
        start += n
    return parts


def record_of(
    block: Block,
    rows: slice,
    size: int,
    lam: Tensor,
    out: Tensor,
    p_in: Tensor | None,
    p_out: Tensor | None,
) -> Record:
    """The record of a pass over a part of a mini-batch of `size` samples at a block's cuts."""

    def a_sample(p: Tensor | None) -> Tensor | None:
        return None if p is None else block.stored_adjoint(p * size)

    return Record(
        rows,
        lam=None if block.first else lam.detach(),
        p_in=a_sample(p_in),
        out=None if block.last else out.detach(),
        p_out=a_sample(p_out),
    )
