"""The samples of a proof: which they are, who reads them, and how the run will divide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.data import Data
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.proof.undivided import UnprovenError
from hybrid.rounds.epoch_windows import EpochSource
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.windows import Batch

ROWS_OF_A_PART = 2
CANDIDATES = 32
"""Samples of which those are chosen, at least."""


@dataclass(frozen=True)
class Samples:
    """What is read of the replicas' shares: inputs and targets, packed, where a rank has them."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    whole: tuple[Tensor | None, Tensor | None] = None, None
    """Those of all of them as one mini-batch, where the shares' shapes differ."""

    def of_replica(self, shares: Sequence[Batch], replica: int) -> Batch:
        """One share, as a mini-batch that is in memory."""
        source = _Source(self.inputs[replica], self.targets[replica])
        return replace(shares[replica], source=source, within=None, whole=None)


@dataclass(frozen=True)
class _Source:
    """A mini-batch in memory."""

    inputs: Tensor
    targets: Tensor
    mixes = joint = False

    def images(self, ids: Tensor, step: int) -> Tensor:
        return self.inputs.clone()

    def labels(self, ids: Tensor, step: int) -> Tensor:
        return self.targets.clone()


def read(batch: Batch, shares: Sequence[Batch], method: Method, links: RankLinks) -> Samples:
    """Read inputs on the first blocks and targets on the last; the first rank has both."""
    place, reads = links.place, method.solver.reads
    own = [place.replica if len(shares) > 1 else 0] if place.number else range(len(shares))
    inputs = [torch.empty(0) for _ in shares]
    targets = [torch.empty(0) for _ in shares]
    last = links.size - 1
    for r in own if place.block == 0 or "images" in reads else ():
        inputs[r] = shares[r].images()
    for r in range(len(shares)) if place.number == last else own:
        if place.block == last or "labels" in reads:
            targets[r] = shares[r].labels()
    known = links.broadcast([y.cpu() for y in targets], at=last)
    if place.number == 0 and last:
        targets = [y.to(method.device) for y in known]
    if not links.broadcast(any(len({x.shape[1:] for x in each}) > 1 for each in (inputs, targets))):
        return Samples(inputs, targets)
    labels = batch.labels().cpu() if place.number == last else None
    labels = links.broadcast(labels, at=last)
    if place.number:
        return Samples(inputs, targets)
    assert labels is not None
    return Samples(inputs, targets, (batch.images(), labels.to(method.device)))


def choose_batch(method: Method, data: Data, parts: int, R: int, links: RankLinks) -> Batch:
    """Samples unlike each other: of the first, the last and others, with targets of all sizes.

    They are in the order of that size, so that parts differ in what a loss may be divided by. A
    stream gives its first.
    """
    train = method.options.train
    share, odd = divmod(train.batch_size, method.options.replicas)
    rows = min(ROWS_OF_A_PART, max(1, share // parts))
    count = R * (parts * rows + bool(share % parts)) + odd * (R > 1)
    source = EpochSource(data, train.seed, 0, True, method.device, method.problem.objectives.mix)
    count = min(count, train.batch_size)
    if data.streamed:
        return Batch(torch.arange(count), 0.0, source)
    order = data.test_order() if data.order is None else data.order.of_epoch(train.seed, 0)
    random = torch.Generator().manual_seed(train.seed)
    inner = 1 + torch.randperm(max(0, len(order) - 2), generator=random)
    ends = torch.tensor([0, len(order) - 1])
    ids = order[torch.cat([ends, inner])[: max(count, CANDIDATES)]]
    chosen: Tensor | None = None
    last = links.size - 1
    if links.place.number == last and not source.mixes:
        by_size = _target_sizes(source.labels(ids, 0).cpu()).argsort(stable=True)
        chosen = by_size[torch.linspace(0, len(ids) - 1, count).round().long()]
    chosen = links.broadcast(chosen, at=last)
    return Batch(ids[:count] if chosen is None else ids[chosen], 0.0, source)


def _target_sizes(targets: Tensor) -> Tensor:
    """A number (N,) of each target: how many of its numbers are none, then their mean."""
    rows = targets.double().flatten(1) if targets.dim() > 1 else targets.double()[:, None]
    missing = rows.isnan()
    return 1e9 * missing.sum(1) + rows.masked_fill(missing, 0.0).mean(1)


def joined(bundle: Bundle | None, packed: Sequence[Tensor], together: Tensor | None) -> Any:
    """What replicas' packed shares hold, as one mini-batch; `together`: as it is collated at once.

    UnprovenError if that holds other numbers than the shares do.
    """
    shares = [x if bundle is None else bundle.unpack(x) for x in packed]
    if together is None:
        return tree_map(lambda *column: torch.cat(column), *shares) if shares[1:] else shares[0]
    whole = together if bundle is None else bundle.unpack(together)
    columns = zip(*map(tree_leaves, shares), strict=True)
    for column, x in zip(columns, tree_leaves(whole), strict=True):
        for share, rows in zip(column, x.split([*map(len, column)]), strict=True):
            cropped = rows[tuple(map(slice, share.shape))]
            if not torch.equal(cropped, share):
                raise UnprovenError(
                    "collated at once, a mini-batch holds other numbers than shares"
                )
    return whole


def parts_of(shares: Sequence[Batch], count: int, together: bool) -> list[list[Tensor]]:
    """The rows of every micro-batch; `together`: of all replicas, whose BatchNorms are one."""
    rows = torch.arange(sum(map(len, shares))).split([len(share) for share in shares])
    parts = [[*own.tensor_split(min(count, len(own)))] for own in rows]
    return [[torch.cat(each) for each in zip(*parts, strict=True)]] if together else parts
