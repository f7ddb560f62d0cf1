"""A user's map-style data set, as training sees it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from hybrid.data.dataset import Data, check_classes
from hybrid.data.fetching import Pool
from hybrid.errors import format_error
from hybrid.solvers.layers.bundle import Bundle

AHEAD = 2
"""Batches that each worker makes ahead."""
KEPT = 8
"""Batches that are kept after their first use: another block of this process, or a local step, may
ask for them again."""
TARGETS = ("target", "targets", "label", "labels", "y")
"""The keys that name the target of a dict."""


class Mapped(Data):
    """Any data set with a length and items: torch's, torchvision's, Hugging Face's.

    An item is (input, target), (input, input, ..., target) or a dict. What its transforms draw from
    `random`, numpy and torch is a function of (seed, epoch, number of the sample) alone.

    Every replica reads its own samples and collates them by itself. Where the data set lists its
    targets, as those of torchvision do, who needs nothing else reads no items.
    """

    joint = True

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        augmented: bool = False,
    ) -> None:
        """Wrap a data set for a trainer.

        Of a dict the target is called target, label(s) or y, and all others are inputs.
        collate: items -> (inputs, targets) or a dict, batched; None: torch's. workers: processes
        that read ahead; 0: none. augmented: whether transforms draw, so that a sample differs in
        every epoch.
        """
        numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not numbered:
            raise ValueError(
                f"a {type(dataset).__name__} is no map-style data set: ranks agree on mini-batches "
                "by the numbers of samples, so it needs __len__ and __getitem__"
            )
        self.dataset, self.augmented = dataset, augmented
        self._count = _length(dataset)
        self._classes = 0
        self._pool = Pool(dataset, collate or _collate, workers)
        self._lock = threading.Lock()
        self._batches: OrderedDict[tuple[Any, ...], Future[Any]] = OrderedDict()
        self._order: list[tuple[Any, ...]] = []
        self._place: dict[tuple[Any, ...], int] = {}
        self._targets = None if collate else listed_targets(dataset)
        if self._targets is not None and not self._agrees(self._targets):
            self._targets = None
        first, second = self.sample(2)
        self.inputs = None if isinstance(first, Tensor) else Bundle.of(first, 2, "an input")
        self.answers = None if isinstance(second, Tensor) else Bundle.of(second, 2, "a target")

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
        inputs: Tensor = self._pair(ids, seed, epoch if augment else 0)[0]
        if self.inputs is not None:
            return self.inputs.pack(inputs)
        image = inputs.dim() == 4 and inputs.is_floating_point()
        # a copy: a batch may be asked for again, and modules may write to their input
        return inputs.clone(memory_format=torch.channels_last if image else torch.contiguous_format)

    def targets(self, ids: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
        targets: Tensor = (
            self._pair(ids, seed, epoch)[1]
            if self._targets is None
            else self._targets[ids % len(self)]
        )
        if self.answers is not None:
            return self.answers.pack(targets)
        if self._classes:
            check_classes(targets, self._classes, ids % len(self))
        return targets.clone()

    def expect_classes(self, count: int) -> None:
        if count and type(self.dataset) is TensorDataset:
            check_classes(self.dataset.tensors[-1], count)
        self._classes = count

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

    def _agrees(self, targets: Tensor) -> bool:
        """Whether a few items have the targets that the data set lists."""
        ids = torch.arange(0, self._count, max(1, self._count // 3))
        read, listed = self._pair(ids, 0, 0)[1], targets[ids]
        same_type = isinstance(read, Tensor) and read.dtype == listed.dtype
        return same_type and torch.equal(read, listed)

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
        return self._inputs_and_targets(self._pool.result(future), len(ids))

    def _submit(self, key: tuple[Any, ...]) -> Future[Any]:
        if key not in self._batches:
            seed, epoch, *ids = key
            self._batches[key] = self._pool.submit(ids, seed, epoch)
        return self._batches[key]

    def _inputs_and_targets(self, batch: Any, count: int) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            targets = [key for key in TARGETS if key in batch]
            if len(targets) != 1:
                raise ValueError(
                    f"items have {', '.join(map(str, batch))}, of which "
                    f"{' and '.join(targets) or 'none'} may be the target: give "
                    "data.Mapped(dataset, collate=...), which makes (inputs, targets) of items"
                )
            inputs = {key: value for key, value in batch.items() if key != targets[0]}
            one = len(inputs) == 1
            pair = next(iter(inputs.values())) if one else inputs, batch[targets[0]]
        elif isinstance(batch, tuple | list) and len(batch) >= 2:
            *some, last = batch
            pair = (some[0] if len(some) == 1 else tuple(some), last)
        else:
            raise ValueError(
                f"an item is a {type(batch).__name__}, not (input, target) or a dict: give both, "
                "or collate="
            )
        for leaf in tree_leaves(pair):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != count:
                shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(
                    f"a batch of {count} samples holds {shape}, not a tensor with a row a sample: "
                    "convert it in the data set, or give collate="
                )
        return pair


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


def as_data(given: Any, workers: int = 0) -> Data:
    """What `fit` was given; ValueError for what is no data set."""
    if isinstance(given, Data):
        return given
    several = isinstance(given, tuple | list) and len(given) > 0
    if several and all(isinstance(x, np.ndarray) for x in given):
        raise ValueError(
            "numpy arrays are no data set: give tensors, as torch.from_numpy makes them"
        )
    if several and all(isinstance(x, Tensor) for x in given):
        if len({len(x) for x in given}) > 1:
            raise ValueError(
                f"inputs and targets have {' and '.join(str(len(x)) for x in given)} rows: give as "
                "many of each"
            )
        return Mapped(TensorDataset(*given))
    return Mapped(given, workers=workers)


def _key(ids: Tensor, seed: int, epoch: int) -> tuple[Any, ...]:
    return (seed, epoch, *ids.tolist())


def _collate(items: list[Any]) -> Any:
    """torch's collate, after lists of numbers, as of Hugging Face, have become tensors."""

    def tensors(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: tensors(value) for key, value in x.items()}
        if isinstance(x, tuple):
            return tuple(map(tensors, x))
        if isinstance(x, list):
            numbers = not any(isinstance(y, Tensor | np.ndarray | list) for y in x)
            return torch.tensor(x) if numbers else [tensors(y) for y in x]
        return x

    def floats(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.dtype is torch.float64 else x

    single = any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in tree_leaves(items))
    batch = default_collate([tensors(item) for item in items])
    # Python's and numpy's numbers are double by default; tensors are as the user made them
    return batch if single else tree_map(floats, batch)
