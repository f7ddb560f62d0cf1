"""Items of a user's data set as inputs and targets, whichever way they are read."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from hybrid.data.dataset import Data, check_classes
from hybrid.errors import ON_META
from hybrid.solvers.layers.bundle import Bundle

TARGETS = ("target", "targets", "label", "labels", "y")
"""The keys that name the target of a dict."""


class Items(Data):
    """Items that a collate function makes batches of: (input, target) or a dict.

    A replica's share of a mini-batch is collated by itself, and its shape may differ from that of
    another mini-batch.
    """

    joint = True
    _batches_vary = False
    """Whether a mini-batch may be of another length than the next, as its collate function pads."""

    def __init__(self, labels_are_inputs: bool) -> None:
        self.labels_are_inputs = labels_are_inputs
        self._classes = 0
        """What `expect_classes` was given."""

    def _learn_structure(self) -> None:
        first, second = pair = self.sample(2)
        inputs = None if isinstance(first, Tensor) else Bundle.of(first, 2, "an input")
        answers = None if isinstance(second, Tensor) else Bundle.of(second, 2, "a target")
        if self._batches_vary:
            others = self._single_samples()
            self.varies = any(_lengths(other) != _lengths(pair) for other in others)
            self.others = others if self.varies else _shorter(pair)
        self.inputs = inputs and inputs.varying(x for x, _ in self.others)
        self.answers = answers and answers.varying(y for _, y in self.others)

    def _single_samples(self) -> list[tuple[Any, Any]]:
        """Some samples, each collated by itself, to learn their lengths."""
        return []

    @abstractmethod
    def _pair(self, ids: Tensor, seed: int, epoch: int) -> tuple[Any, Any]:
        """Inputs and targets of the samples, which the caller does not write to."""

    def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
        inputs: Tensor = self._pair(ids, seed, epoch if augment else 0)[0]
        if self.inputs is not None:
            return self.inputs.pack(inputs)
        image = inputs.dim() == 4 and inputs.is_floating_point()
        # a copy: a batch may be asked for again, and modules may write to their input
        return inputs.clone(memory_format=torch.channels_last if image else torch.contiguous_format)

    def targets(self, ids: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
        targets = self._targets_of(ids, seed, epoch)
        if self.answers is not None:
            return self.answers.pack(targets)
        if self._classes:
            check_classes(targets, self._classes, ids % len(self))
        return targets.clone()

    def _targets_of(self, ids: Tensor, seed: int, epoch: int) -> Tensor:
        targets: Tensor = self._pair(ids, seed, epoch)[1]
        return targets

    def expect_classes(self, count: int) -> None:
        self._classes = count

    def _split(self, batch: Any, count: int) -> tuple[Any, Any]:
        """Inputs and targets of a batch; ValueError unless each has `count` rows."""
        if isinstance(batch, Mapping):
            pair = self._split_dict(batch)
        elif self.labels_are_inputs:
            raise ValueError(
                f"labels_are_inputs is True, but an item is a {type(batch).__name__}: give dicts, "
                "whose key names the label that the network takes"
            )
        elif isinstance(batch, tuple | list) and len(batch) >= 2:
            *inputs, target = batch
            pair = (inputs[0] if len(inputs) == 1 else tuple(inputs), target)
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
            if leaf.is_meta:
                raise ValueError(f"a batch of {count} samples has a tensor {ON_META}")
        return pair

    def _split_dict(self, batch: Mapping[Any, Any]) -> tuple[Any, Any]:
        targets = [key for key in TARGETS if key in batch]
        if len(targets) != 1:
            raise ValueError(
                f"items have {', '.join(map(str, batch))}, of which "
                f"{' and '.join(targets) or 'none'} may be the target: give "
                "data.Mapped(dataset, collate=...), which makes (inputs, targets) of items"
            )
        if self.labels_are_inputs:
            return dict(batch), batch[targets[0]]
        inputs = {key: value for key, value in batch.items() if key != targets[0]}
        return next(iter(inputs.values())) if len(inputs) == 1 else inputs, batch[targets[0]]


def _lengths(pair: tuple[Any, Any]) -> list[Any]:
    return [x.shape[1:] for x in tree_leaves(pair)]


def _shorter(pair: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """A sample of texts without their last token; None without texts."""
    texts = [x for x in tree_leaves(pair[0]) if not x.is_floating_point() and x.dim() > 1]
    length = texts[0].shape[1] if texts else 0
    if length < 2:
        return []

    def shorter(x: Tensor) -> Tensor:
        for dim, n in enumerate(x.shape):
            x = x.narrow(dim, 0, length - 1) if dim and n == length else x
        return x

    return [tree_map(shorter, pair)]


def collate_numbers(items: list[Any]) -> Any:
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
