"""A user's transform of whole mini-batches: mixup, CutMix, smoothed labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from hybrid.data.dataset import Data
from hybrid.errors import refused
from hybrid.solvers.layers.bundle import Bundle

Transform = Callable[[Any, Any, Generator], tuple[Any, Any]]
"""(inputs, targets, random) -> inputs and targets of as many samples.

A pure function: what it draws, it draws from `random`, the `Generator` of (seed, step).
"""


@dataclass(frozen=True)
class Mix:
    """A transform between packed tensors."""

    transform: Transform
    data: Data
    answers: Bundle | None
    """The structure of the transformed targets, if they are not one tensor."""
    form: Any = None
    """Number formats of the transformed inputs, and the structure of the targets."""

    @classmethod
    def of(cls, transform: Transform, data: Data, count: int) -> "tuple[Mix, Any, Any]":
        """Apply the transform to a sample; ValueError if its result does not fit."""
        inputs, targets = _apply_transform(transform, *data.sample(count), generator(0, 0))
        answers = None if isinstance(targets, Tensor) else Bundle.of(targets, count, "a target")
        form = _formats(inputs), tree_structure(targets)
        return cls(transform, data, answers, form), inputs, targets

    def __call__(
        self, inputs: Tensor, targets: Tensor, seed: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the whole mini-batch of a step."""
        data = self.data
        x = inputs if data.inputs is None else data.inputs.unpack(inputs)
        y = targets if data.answers is None else data.answers.unpack(targets)
        x, y = _apply_transform(self.transform, x, y, generator(seed, step))
        if (_formats(x), tree_structure(y)) != self.form:
            raise ValueError(
                f"batch_transform made inputs of {_formats(x)} and targets of shape {shapes(y)} at "
                f"step {step}, other than of the first samples: it must always give the same"
            )
        x = x if data.inputs is None else data.inputs.pack(x)
        y = y if self.answers is None else self.answers.pack(y)
        return x, y


def _apply_transform(
    transform: Transform, inputs: Any, targets: Any, random: Generator
) -> tuple[Any, Any]:
    """A transformed mini-batch; ValueError if it fails or changes the number of samples."""
    before, formats, count = shapes(inputs), _formats(inputs), len(tree_leaves(inputs)[0])
    with refused(f"batch_transform fails on {count} samples"):
        pair = transform(inputs, targets, random)
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ValueError(
            f"batch_transform gave a {type(pair).__name__}: it must give (inputs, targets)"
        )
    inputs, targets = pair
    if shapes(inputs) != before:
        raise ValueError(
            f"batch_transform made inputs of shape {shapes(inputs)} of {before}: it must keep it"
        )
    for old, new in zip(formats, _formats(inputs), strict=True):
        widened = isinstance(new, torch.dtype) and new.is_floating_point > old.is_floating_point
        if new != old and not widened:  # integers may become floats, as images do
            raise ValueError(
                f"batch_transform made inputs of {new} of {old}: it must keep the number format"
            )
    if any(getattr(x, "shape", ())[:1] != (count,) for x in tree_leaves(targets)):
        raise ValueError(
            f"batch_transform made targets of shape {shapes(targets)} of {count} samples: it must "
            "give each a row"
        )
    return inputs, targets


def _formats(value: Any) -> list[Any]:
    """The number format of every tensor in a value, and the type of anything else."""
    return [x.dtype if isinstance(x, Tensor) else type(x).__name__ for x in tree_leaves(value)]


def generator(seed: int, step: int) -> Generator:
    """The generator of one mini-batch's draws."""
    return Generator().manual_seed(seed * 1_000_003 + step)


def shapes(value: Any) -> Any:
    """The shape of every tensor in a value."""
    return tree_map(lambda x: tuple(getattr(x, "shape", (type(x).__name__,))), value)
