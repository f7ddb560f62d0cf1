"""What a network's output is worth beside the targets: the loss, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from solvers.layers.bundle import Bundle
from solvers.windows import Classified

Loss = Callable[[Any, Any], Tensor]
"""(output, targets) -> the mean over the samples, or a loss of each, (N,) or (N, ...)."""
LEFT_OUT = -100
"""The class of what counts for nothing."""
Metric = Callable[[Any, Any], Tensor]
"""(output, targets) -> the mean over the samples, or a score of each, (N,) or (N, ...)."""


FAULTS = (
    *(RuntimeError, TypeError, ValueError, AttributeError),
    *(LookupError, ArithmeticError, AssertionError, OSError),
)
"""What a user's code raises by mistake; torch has exceptions that are none, to leave a forward."""


def right_answers(out: Tensor, targets: Tensor) -> Tensor:
    """Which of the logits (N, classes, ...) are largest at their class (N, ...).

    Where classes are left out (-100, as cross-entropy does), the share of the others.
    """
    right, known = out.argmax(1) == targets, targets != LEFT_OUT
    if not targets.is_cuda and bool(known.all()):  # of a GPU that would have to be waited for
        return right
    return right.sum().double() / known.sum().clamp_min(1)


@dataclass(frozen=True)
class Objective:
    """A loss and metrics by name; accuracy is counted in training, too."""

    loss: Loss = nn.functional.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": right_answers})
    targets: Bundle | None = None
    """Of the targets, where they are not one tensor."""
    named: str = "the loss"
    each: bool = False
    """Whether the loss of each sample is wanted beside their mean."""

    def __call__(self, out: Any, targets: Tensor) -> Classified:
        """Mean loss with its graph, and the sum of the accuracy over the samples."""
        count = len(targets)
        known = targets if self.targets is None else self.targets.unpack(targets)
        loss = mean(asked(self.named, self.loss, out, known), count)
        if torch.is_grad_enabled() and not loss.requires_grad and _has_graph(out):
            raise ValueError(
                "the loss gave a tensor without a gradient: let torch compute it from the output, "
                "without detach(), item() or a comparison"
            )
        each = self._each(out, known, count) if self.each else None
        metric = self.metrics.get("accuracy")
        if metric is None:
            return Classified(loss, None, each)
        scores = asked("the metric 'accuracy'", metric, detached(out), known)
        return Classified(loss, total(scores, count), each)

    def _each(self, out: Any, known: Any, count: int) -> Tensor:
        """Loss of each of `count` samples, (count,), float32."""
        loss: Any = self.loss
        with suppress(TypeError, ValueError):  # what has no signature has no such argument
            if "reduction" in signature(loss).parameters:
                loss = partial(loss, reduction="none")
        with torch.no_grad():
            values = asked(self.named, loss, detached(out), known)
        if values.dim() == 0 or len(values) != count:
            raise ValueError(
                f"{self.named} gives a tensor of shape {tuple(values.shape)} for {count} samples, "
                "and the sampler learns from a loss of each: give one that takes reduction='none', "
                "or gives a row a sample, or take sampler.name=uniform"
            )
        each: Tensor = values.float()
        return each.flatten(1).mean(1) if each.dim() > 1 else each

    def measured(self, out: Any, targets: Tensor) -> list[Tensor]:
        """Sums over the samples of the loss and of every metric, in float64."""
        count = len(targets)
        known = targets if self.targets is None else self.targets.unpack(targets)
        sums = [mean(asked(self.named, self.loss, out, known), count).double() * count]
        for name, metric in self.metrics.items():
            scores = asked(f"the metric {name!r}", metric, out, known)
            sums.append(total(scores, count).to(sums[0]))
        return sums


def asked(what: str, function: Loss | Metric, out: Any, targets: Any) -> Any:
    """What a loss or a metric gives; ValueError if it fails, which says on what."""
    try:
        return function(out, targets)
    except FAULTS as error:
        raise ValueError(
            f"{what} fails on output {described(out)} and targets {described(targets)}: "
            f"{failure(error)}"
        ) from error


def described(value: Any) -> str:
    """Shapes and types of tensors."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return str(tree_map(described, value))


def failure(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason'])[0]}"


def _has_graph(out: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(out))


def detached(out: Any) -> Any:
    """An output without its graph."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)


def mean(values: Tensor, count: int) -> Tensor:
    """Of losses, one of each of `count` samples or their mean; ValueError for anything else."""
    if not isinstance(values, Tensor):
        raise ValueError(f"the loss gave a {type(values).__name__}, not a tensor")
    if values.dim() == 0:
        return values
    if len(values) != count:
        raise ValueError(
            f"the loss gave a tensor of shape {tuple(values.shape)} for {count} samples: it must "
            "give their mean, or a row a sample"
        )
    return values.mean()


def total(values: Tensor, count: int) -> Tensor:
    """Sum over the samples of scores, (N,), (N, ...) or their mean; right answers are counted."""
    try:
        values = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"a metric gave a {type(values).__name__}, {str(values)[:40]!r}: it must give a tensor "
            "or a number"
        ) from None
    if values.dim() == 0:
        return values * count
    if len(values) != count:
        raise ValueError(
            f"a metric gave a tensor of shape {tuple(values.shape)} for {count} samples: it must "
            "give their mean, or a row a sample"
        )
    if values.dim() == 1:
        return values.sum()
    return values.flatten(1).double().mean(1).sum()
