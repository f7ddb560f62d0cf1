"""A user's map-style data set, as training sees it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hybrid.data.dataset import check_classes, spread
from hybrid.data.fetching import Pool, Workers, own_draws, plain, seed_draws
from hybrid.data.items import Items, collate_numbers
from hybrid.errors import format_error

AHEAD = 2
"""Batches that each worker makes ahead."""
KEPT = 8
"""Batches that are kept after their first use: another block of this process, or a local step, may
ask for them again."""


class Mapped(Items):
    """Any data set with a length and items: torch's, torchvision's, Hugging Face's.

    An item is (input, target), (input, input, ..., target) or a dict. What its transforms draw from
    `random`, numpy and torch is a function of (seed, epoch, number of the sample) alone.

    Every replica reads its own samples and collates them by itself. Where the data set lists its
    targets, as those of torchvision do, who needs nothing else reads no items.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int | Workers = 0,
        augmented: bool = False,
        labels_are_inputs: bool = False,
    ) -> None:
        """Wrap a data set for a trainer.

        Of a dict the target is called target, label(s) or y, and all others are inputs.
        collate: items -> (inputs, targets) or a dict, batched; None: torch's. workers: processes
        that read ahead; 0: none. augmented: whether transforms draw, so that a sample differs in
        every epoch. labels_are_inputs: whether the target of a dict is also an input of the
        network, under its own key.
        """
        numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not numbered:
            raise ValueError(
                f"a {type(dataset).__name__} is no map-style data set, which has __len__ and "
                "__getitem__: give data.Stream(iterable, samples=...), or a DataLoader to fit"
            )
        super().__init__(labels_are_inputs)
        self.dataset, self.augmented = dataset, augmented
        self._count = _length(dataset)
        self._pool = Pool(dataset, collate or collate_numbers, workers)
        self._collate, self._workers = collate, workers
        self._lock = threading.Lock()
        self._batches: OrderedDict[tuple[Any, ...], Future[Any]] = OrderedDict()
        self._order: list[tuple[Any, ...]] = []
        self._place: dict[tuple[Any, ...], int] = {}
        self._targets = None if collate else listed_targets(dataset)
        if self._targets is not None and not self._agrees(self._targets):
            self._targets = None
        self._batches_vary = collate is not None
        self._learn_structure()

    def __len__(self) -> int:
        return self._count

    def subset(self, ids: Tensor) -> Mapped:
        part = Mapped(
            Subset(self.dataset, ids.tolist()),
            collate=self._collate,
            workers=self._workers,
            augmented=self.augmented,
            labels_are_inputs=self.labels_are_inputs,
        )
        part.batch_size = self.batch_size
        return part

    def _targets_of(self, ids: Tensor, seed: int, epoch: int) -> Tensor:
        if self._targets is None:
            return super()._targets_of(ids, seed, epoch)
        return self._targets[ids % len(self)]

    def expect_classes(self, count: int) -> None:
        if count and type(self.dataset) is TensorDataset:
            check_classes(self.dataset.tensors[-1], count)
        super().expect_classes(count)

    def leaves_out(self, target: int) -> bool:
        known = self._targets
        if type(self.dataset) is TensorDataset:
            known = self.dataset.tensors[-1]
        return known is None or bool((known == target).any())

    def sample(self, count: int) -> tuple[Any, Any]:
        ids = torch.arange(min(2, self._count))
        rows = torch.arange(count) % len(ids)
        inputs, targets = tree_map(lambda x: x[rows], self._pair(ids, 0, 0))
        return inputs, targets

    def _single_samples(self) -> list[tuple[Any, Any]]:
        found = []
        for i in sorted({self._count // 4, self._count // 2, self._count - 1} - {0, 1}):
            with suppress(ValueError):  # from a collate function that takes several only
                found.append(self._pair(torch.tensor([i]), 0, 0))
        return found

    def _agrees(self, targets: Tensor) -> bool:
        """Whether a few items have the targets that the data set lists."""
        ids = torch.arange(0, self._count, max(1, self._count // 3))
        read, listed = self._pair(ids, 0, 0)[1], targets[ids]
        same_type = isinstance(read, Tensor) and read.dtype == listed.dtype
        return same_type and torch.equal(read, listed)

    def some(self, one: int | None = None) -> list[Any]:
        """Items as the data set gives them, of those that training reads; empty if one fails."""
        order = torch.arange(len(self)) if self.order is None else self.order.of_epoch(0, 0)
        ids = order[spread(len(order))].tolist()
        items = []
        with own_draws(), suppress(Exception, SystemExit):  # whatever a user's code raises
            for i in ids if one is None else [ids[one % len(ids)]]:
                seed_draws(0, 0, i)
                items.append(plain(self.dataset[i]))
            return items
        return []

    def expect(self, batches: list[Tensor], seed: int, epoch: int) -> None:
        with self._lock:
            self._order = [_key(ids, seed, epoch) for ids in batches]
            self._place = {key: i for i, key in enumerate(self._order)}

    def close(self) -> None:
        with self._lock:
            self._batches.clear()
            self._pool.close()

    def _pair(self, ids: Tensor, seed: int, epoch: int) -> tuple[Any, Any]:
        """Inputs and targets of the samples; workers begin with those that are needed next."""
        key = _key(ids, seed, epoch)
        with self._lock:
            future = self._submit(key)
            if self._pool.workers and key in self._place:
                next_, ahead = self._place[key] + 1, AHEAD * self._pool.workers
                for other in islice(self._order, next_, next_ + ahead):
                    self._submit(other)
            most = KEPT + AHEAD * self._pool.workers
            while len(self._batches) > most:
                self._batches.popitem(last=False)
        return self._split(self._pool.result(future), len(ids))

    def _submit(self, key: tuple[Any, ...]) -> Future[Any]:
        if key not in self._batches:
            seed, epoch, *ids = key
            self._batches[key] = self._pool.submit(ids, seed, epoch)
        return self._batches[key]


def listed_targets(dataset: Any) -> Tensor | None:
    """The classes of all items, int64 (N,), where a data set lists them and transforms none."""
    if isinstance(dataset, Subset):
        whole = listed_targets(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        found = getattr(dataset, name, None)
        if isinstance(found, list | tuple | np.ndarray | Tensor) and len(found) == len(dataset):
            try:
                targets = torch.as_tensor(found)
            except (TypeError, ValueError, RuntimeError):
                continue
            if targets.dtype == torch.int64 and targets.dim() == 1:
                return targets
    return None


def _length(dataset: Any) -> int:
    """How many samples it has; ValueError for none, and for what its __len__ raises."""
    try:
        count = len(dataset)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(
            f"len() of {type(dataset).__name__} fails: {format_error(error)}"
        ) from error
    if count == 0:
        raise ValueError(f"{type(dataset).__name__} has 0 samples: training needs at least 1")
    return count


def _key(ids: Tensor, seed: int, epoch: int) -> tuple[Any, ...]:
    return (seed, epoch, *ids.tolist())
