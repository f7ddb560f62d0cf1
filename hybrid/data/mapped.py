"""A user's map-style data set, as training sees it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Subset, TensorDataset

from hybrid.data.dataset import check_classes, spread
from hybrid.data.items import Items, collate_numbers
from hybrid.data.reader import Key, Reader, Workers, to_tensors
from hybrid.data.sampling import restored_generators, seed_generators
from hybrid.errors import refused


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
        super().__init__(labels_are_inputs)
        self.dataset, self.augmented = dataset, augmented
        with refused(f"len() of {type(dataset).__name__} fails"):
            self._count = len(dataset)
        if self._count == 0:
            raise ValueError(f"{type(dataset).__name__} has 0 samples: training needs at least 1")
        self._collate, self._workers = collate, workers
        self._reader = Reader(dataset, collate or collate_numbers, workers)
        self._targets = None if collate else listed_targets(dataset)
        if self._targets is not None and not self._agrees(self._targets):
            self._targets = None
        self._batches_vary = collate is not None
        self._learn_structure()

    def __len__(self) -> int:
        return self._count

    def subset(self, ids: Tensor) -> "Mapped":
        part = type(self)(
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
        if count and self._targets is not None:
            check_classes(self._targets, count)
        super().expect_classes(count)

    def leaves_out(self, target: int) -> bool:
        return self._targets is None or bool((self._targets == target).any())

    def sample(self, count: int) -> tuple[Any, Any]:
        ids = torch.arange(min(2, self._count))
        rows = torch.arange(count) % len(ids)
        inputs, targets = tree_map(lambda x: x[rows], self._pair(ids, 0, 0))
        return inputs, targets

    def _single_samples(self) -> list[tuple[Any, Any]]:
        samples = []
        for i in sorted({self._count // 4, self._count // 2, self._count - 1} - {0, 1}):
            with suppress(ValueError):  # from a collate function that takes several only
                samples.append(self._pair(torch.tensor([i]), 0, 0))
        return samples

    def _agrees(self, targets: Tensor) -> bool:
        """Whether some items have the targets that the data set lists."""
        ids = torch.arange(0, self._count, max(1, self._count // 3))
        read, listed = self._pair(ids, 0, 0)[1], targets[ids]
        same_type = isinstance(read, Tensor) and read.dtype == listed.dtype
        return same_type and torch.equal(read, listed)

    def some(self, one: int | None = None) -> list[Any]:
        """Items as the data set gives them, of those that training reads; empty if one fails."""
        order = torch.arange(len(self)) if self.order is None else self.order.of_epoch(0, 0)
        ids = order[spread(len(order))].tolist()
        items = []
        with restored_generators(), suppress(Exception, SystemExit):  # of a user's code
            for i in ids if one is None else [ids[one % len(ids)]]:
                seed_generators(0, 0, i)
                items.append(to_tensors(self.dataset[i]))
            return items
        return []

    def expect(self, batches: list[Tensor], seed: int, epoch: int) -> None:
        self._reader.announce([_key(ids, seed, epoch) for ids in batches])

    def close(self) -> None:
        self._reader.close()

    def _pair(self, ids: Tensor, seed: int, epoch: int) -> tuple[Any, Any]:
        return self._split(self._reader.read(_key(ids, seed, epoch)), len(ids))


def listed_targets(dataset: Any) -> Tensor | None:
    """The classes of all items, int64 (N,), where a data set lists them and transforms none."""
    if isinstance(dataset, Subset):
        whole = listed_targets(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        listed = getattr(dataset, name, None)
        if isinstance(listed, list | tuple | np.ndarray | Tensor) and len(listed) == len(dataset):
            with suppress(TypeError, ValueError, RuntimeError):
                targets = torch.as_tensor(listed)
                if targets.dtype == torch.int64 and targets.dim() == 1:
                    return targets
    return None


def _key(ids: Tensor, seed: int, epoch: int) -> Key:
    return (seed, epoch, *ids.tolist())
