"""The samples of a proof: which they are, who reads them, and how the run will divide them."""

from collections.abc import Callable, Sequence
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
"""The least number of samples to choose from."""


@dataclass(frozen=True)
class Samples:
    """Packed inputs and targets of the replicas' shares, on every rank.

    Where the shapes of shares differ, those of all of them as one mini-batch come last.
    """

    shares: Sequence[Batch]
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]

    @classmethod
    def read(
        cls, shares: Sequence[Batch], whole: Batch, method: Method, links: RankLinks
    ) -> "Samples":
        """Read inputs on the first rank, and targets on the last one of its chain, for all."""

        def read(give: Callable[[Batch], Tensor], at: int) -> list[Tensor]:
            tensors = list[Tensor]()
            if links.place.number == at:
                tensors = [give(share).cpu() for share in shares]
                if len({x.shape[1:] for x in tensors}) > 1:
                    tensors.append(give(whole).cpu())
            return [x.to(method.device) for x in links.broadcast(tensors, at=at)]

        return cls(shares, read(Batch.images, 0), read(Batch.labels, links.size - 1))

    def of_replica(self, replica: int) -> Batch:
        """One share, as a mini-batch that is in memory."""
        source = _Source(self.inputs[replica], self.targets[replica])
        return replace(self.shares[replica], source=source, within=None, whole=None)

    def joined(self, bundle: Bundle | None, packed: Sequence[Tensor]) -> Any:
        """The inputs or the targets of all shares as one mini-batch.

        UnprovenError if it holds other numbers, where it is collated at once, than the shares do.
        """
        unpacked = [x if bundle is None else bundle.unpack(x) for x in packed]
        parts, whole = unpacked[: len(self.shares)], unpacked[len(self.shares) :]
        if not whole:
            return tree_map(lambda *column: torch.cat(column), *parts) if parts[1:] else parts[0]
        columns = zip(*map(tree_leaves, parts), strict=True)
        for column, x in zip(columns, tree_leaves(whole[0]), strict=True):
            for share, rows in zip(column, x.split([*map(len, column)]), strict=True):
                if not torch.equal(rows[tuple(map(slice, share.shape))], share):
                    raise UnprovenError(
                        "collated at once, a mini-batch holds other numbers than shares"
                    )
        return whole[0]

    def parts(self, count: int, together: bool) -> list[list[Tensor]]:
        """Rows of every micro-batch; `together`: of all replicas, which share BatchNorms."""
        rows = torch.arange(sum(map(len, self.shares))).split([*map(len, self.shares)])
        parts = [[*each.tensor_split(min(count, len(each)))] for each in rows]
        return [[torch.cat(each) for each in zip(*parts, strict=True)]] if together else parts


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


def choose_batch(method: Method, data: Data, parts: int, R: int, links: RankLinks) -> Batch:
    """Samples unlike each other: of the first, the last and others, with targets of all sizes.

    They are sorted by the size of targets, so that parts differ in a loss's denominator. A stream
    gives its first samples.
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
