"""A user's transform of whole mini-batches: mixup, CutMix, smoothed labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.data.dataset import Data
from hybrid.data.sampling import uniform
from hybrid.errors import format_error
from hybrid.solvers.layers.bundle import Bundle

Transform = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(inputs, targets, random) -> inputs and targets of as many samples.

A pure function: what it draws, it draws from `random`, the `Generator` of (seed, step), or of a
transform `by_sample` its `Draws`.
"""
_STREAM = 2000
"""The first of the streams of random numbers that transforms of samples draw from."""


def by_sample(transform: Transform) -> Transform:
    """Declare that a transform makes each sample without the others of its mini-batch.

    Replicas then read and transform their share alone. It draws from `Draws`, not a generator.
    """
    transform.by_sample = True  # type: ignore[attr-defined]
    return transform


class Draws:
    """Random numbers of samples, the same in any share: functions of (seed, epoch, number)."""

    def __init__(self, seed: int, epoch: int, ids: Tensor) -> None:
        self._seed, self._epoch, self._ids = seed, epoch, ids
        self._stream = _STREAM

    def __call__(self, count: int = 1) -> Tensor:
        """As many for each sample, (N, count), uniform in [0, 1), float64; others every time."""
        streams = range(self._stream, self._stream + count)
        self._stream = streams.stop
        return torch.stack([uniform(self._seed, self._epoch, self._ids, s) for s in streams], 1)


@dataclass(frozen=True)
class Mix:
    """A transform between packed tensors."""

    transform: Transform
    data: Data
    answers: Bundle | None
    """The structure of the transformed targets, if they are not one tensor."""

    @property
    def by_sample(self) -> bool:
        """Whether it makes each sample without the others."""
        return bool(getattr(self.transform, "by_sample", False))

    @classmethod
    def of(cls, transform: Transform, data: Data, count: int) -> tuple[Mix, Any, Any]:
        """The transform and what it makes of a sample; ValueError if that does not fit."""
        made, ids = cls(transform, data, None), torch.arange(count)
        known, goal = data.sample(count)
        inputs, targets = _apply_transform(transform, known, goal, made._random(ids, 0, 0, 0))
        if made.by_sample:
            for n in range(count):
                row, own = slice(n, n + 1), made._random(ids[n : n + 1], 0, 0, 0)
                x, y = tree_map(lambda x, row=row: x[row], data.sample(count))
                _check_alone(_apply_transform(transform, x, y, own), (inputs, targets), row)
        if not isinstance(targets, Tensor):
            made = replace(made, answers=Bundle.of(targets, count, "a target"))
        return made, inputs, targets

    def __call__(
        self, inputs: Tensor, targets: Tensor, ids: Tensor, seed: int, epoch: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the mini-batch of a step; by sample, of any share of it."""
        data = self.data
        known = inputs if data.inputs is None else data.inputs.unpack(inputs)
        goal = targets if data.answers is None else data.answers.unpack(targets)
        random = self._random(ids, seed, epoch, step)
        known, goal = _apply_transform(self.transform, known, goal, random)
        return (
            known if data.inputs is None else data.inputs.pack(known),
            goal if self.answers is None else self.answers.pack(goal),
        )

    def _random(self, ids: Tensor, seed: int, epoch: int, step: int) -> Generator | Draws:
        return Draws(seed, epoch, ids) if self.by_sample else generator(seed, step)


def _check_alone(alone: Any, together: Any, row: slice) -> None:
    """ValueError unless a transform made the same of a sample alone as of it among others."""
    pairs = zip(tree_leaves(alone), tree_leaves(together), strict=True)
    if not all(torch.equal(own, among[row]) for own, among in pairs):
        raise ValueError(
            "batch_transform is declared to work by sample, but makes another sample of one that "
            "is alone than of the same among others: leave out by_sample"
        )


def _apply_transform(
    transform: Transform, inputs: Any, targets: Any, random: Generator | Draws
) -> tuple[Any, Any]:
    """A transformed mini-batch; ValueError if it fails or changes the number of samples."""
    before, count = shapes(inputs), len(tree_leaves(inputs)[0])
    try:
        made = transform(inputs, targets, random)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(
            f"batch_transform fails on {count} samples: {format_error(error)}"
        ) from None
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise ValueError(
            f"batch_transform gave a {type(made).__name__}: it must give (inputs, targets)"
        )
    inputs, targets = made
    if shapes(inputs) != before:
        raise ValueError(
            f"batch_transform made inputs of shape {shapes(inputs)} of {before}: it must keep it"
        )
    if any(getattr(x, "shape", ())[:1] != (count,) for x in tree_leaves(targets)):
        raise ValueError(
            f"batch_transform made targets of shape {shapes(targets)} of {count} samples: it must "
            "give each a row"
        )
    return inputs, targets


def generator(seed: int, step: int) -> Generator:
    """The generator of one mini-batch's draws."""
    return Generator().manual_seed(seed * 1_000_003 + step)


def shapes(value: Any) -> Any:
    """The shape of every tensor in a value."""
    return tree_map(lambda x: tuple(getattr(x, "shape", (type(x).__name__,))), value)
