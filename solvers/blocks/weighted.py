"""Losses whose mean does not count every sample alike: class weights, targets that are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
"""(output, targets) -> the mean over the samples, or a loss of each, (N,) or (N, ...)."""

SMALLEST = torch.finfo(torch.float64).tiny


@runtime_checkable
class Weighted(Protocol):
    r"""A loss that is a weighted mean, and says what it divides by.

        loss = (sum_i v_i l_i) / (sum_i v_i)

    The weights follow from the targets alone, so a mini-batch's denominator is known before any of
    its parts goes backward. Parts then give, together, the gradient of the undivided mini-batch.
    Where nothing counts, the loss must be finite.
    """

    def __call__(self, output: Any, targets: Any, /) -> Tensor:
        """The weighted mean."""

    def denominator(self, targets: Any, /) -> Tensor:
        """sum_i v_i, a tensor of one number."""


@dataclass(frozen=True)
class OverClasses:
    """torch's cross-entropy or NLL loss, with v_i the weight of the target's class; 0: left out."""

    loss: Loss
    class_weights: Tensor | None = None
    left_out: int = -100
    """`ignore_index`."""

    def __call__(self, output: Any, targets: Any) -> Tensor:
        if not _are_classes(targets):
            return self.loss(output, targets)
        # torch divides by 0 where nothing counts: a class that does will do there, it weighs 0
        classes = torch.arange(output.shape[1], device=targets.device)
        weights = 1.0 if self.class_weights is None else self.class_weights.to(targets.device)
        counting = ((classes != self.left_out) * weights).argmax()
        return self.loss(output, torch.where(self.denominator(targets) > 0, targets, counting))

    def denominator(self, targets: Any) -> Tensor:
        """The weights of the targets' classes, summed in float64; with probabilities, N."""
        if not _are_classes(targets):
            return torch.tensor(float(len(targets)), dtype=torch.float64)
        counts: Tensor = targets != self.left_out
        if self.class_weights is None:
            return counts.double().sum()
        weights: Tensor = self.class_weights.to(targets.device)[torch.where(counts, targets, 0)]
        return torch.where(counts, weights.double(), 0.0).sum()


def _are_classes(targets: Any) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def weighted(loss: Loss) -> Weighted | None:
    """The loss as a weighted mean, where it is known to be one; None: each sample counts alike."""
    if isinstance(loss, Weighted):
        return loss
    function = loss.func if isinstance(loss, partial) else loss
    given = loss.keywords if isinstance(loss, partial) and not loss.args else {}
    if function in (nn.functional.cross_entropy, nn.functional.nll_loss):
        if given.get("reduction", "mean") == "mean":
            return OverClasses(loss, given.get("weight"), given.get("ignore_index", -100))
    elif isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.reduction == "mean":
        known = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        if type(loss).forward in known:
            return OverClasses(loss, loss.weight, loss.ignore_index)
    return None
