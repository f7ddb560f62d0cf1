"""The loss and the metrics of a network's output and its targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_structure, tree_unflatten

from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.metrics import (
    LEFT_OUT,
    Accumulating,
    AllSamples,
    Metric,
    call_user_code,
    described,
    detached,
    right_answers,
    sum_and_weight,
    training_sum,
    user_code,
)
from hybrid.solvers.windows import LossAndMetric

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


Counts = Literal["samples", "labels", "shifted labels"]
"""What a mean is over: samples, labels that are not left out, or these without the first of each
sample, which a causal language model does not predict."""


@dataclass(frozen=True)
class DividedBy:
    """A loss that is a weighted mean, and what it is divided by, as its user declares it.

    Where nothing counts it is 0, and must have no gradient there, as torch's losses have none.
    """

    loss: Loss
    sum_of_weights: Callable[[Any], Any]
    """targets -> sum_i v_i, a tensor of one number or a number."""

    def __call__(self, output: Any, targets: Any) -> Tensor:
        loss = self.loss(output, targets)
        weight = self.denominator(targets)
        return torch.where(weight.to(loss.device) > 0, loss, torch.zeros_like(loss))

    def denominator(self, targets: Any) -> Tensor:
        weight = self.sum_of_weights(targets)
        return weight if isinstance(weight, Tensor) else torch.tensor(weight, dtype=torch.float64)


@dataclass(frozen=True)
class CountOf:
    """How many samples or labels of targets (N, ...) a mean is over."""

    what: Counts
    left_out: int = LEFT_OUT
    """The label that does not count."""

    def __call__(self, targets: Any) -> Tensor:
        first = tree_leaves(targets)[0]
        if self.what == "samples":
            return torch.tensor(float(len(first)), dtype=torch.float64)
        labels: Tensor = first[:, 1:] if self.what == "shifted labels" else first
        return (labels != self.left_out).double().sum()


def loss_of(output: Any, targets: Any = None) -> Tensor:
    """A network's own loss, in its output: its `loss`, or the first of several tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple | list) and output and loss is None:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"the network's output, a {type(output).__name__}, has no loss of its own: give "
            "targets among its inputs (labels_are_inputs=True, and labels in the sample= of "
            "split), or give loss="
        )
    return loss.reshape(())


def _are_classes(targets: Any) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def weighted(loss: Loss) -> Weighted | None:
    """The loss as a weighted mean, where it is known to be one; None: each sample counts alike."""
    if isinstance(loss, Weighted):
        return loss
    function = loss.func if isinstance(loss, partial) else loss
    arguments = loss.keywords if isinstance(loss, partial) and not loss.args else {}
    if function in (nn.functional.cross_entropy, nn.functional.nll_loss):
        if arguments.get("reduction", "mean") == "mean":
            return OverClasses(loss, arguments.get("weight"), arguments.get("ignore_index", -100))
    elif isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.reduction == "mean":
        forwards = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        if type(loss).forward in forwards:
            return OverClasses(loss, loss.weight, loss.ignore_index)
    return None


class LossCheck(Protocol):
    """Sees on the last block whether the loss of a mini-batch is the mean of its parts'."""

    def take(self, part: Any, lam: Tensor, out: Any, loss: Tensor) -> None:
        """A micro-batch, its input there, the output and the loss; ValueError where it is none."""


@dataclass(frozen=True)
class Objective:
    """A loss and metrics by name; the metric "accuracy" is measured in training, too."""

    loss: Loss = nn.functional.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": right_answers})
    targets: Bundle | None = None
    """The bundle of the targets, if they are not one tensor."""
    named: str = "the loss"
    each: bool = False
    """Whether the loss of each sample is needed, besides their mean."""
    output: TreeSpec = field(default_factory=lambda: tree_structure(0))
    """The structure of the network's output."""
    alike: bool = False
    """Whether all targets are known to weigh alike in it."""

    @cached_property
    def weighted(self) -> Weighted | None:
        """The loss, where it is a weighted mean."""
        return None if self.alike else weighted(self.loss)

    def weight(self, targets: Tensor) -> Tensor | None:
        """What the targets weigh in the loss together; None: each sample counts alike."""
        if self.weighted is None:
            return None
        return denominator(self.named, self.weighted, self._unpacked(targets))

    def __call__(self, out: Any, targets: Tensor, weight: Tensor | None = None) -> LossAndMetric:
        """Mean loss with its graph, and what the accuracy needs.

        Of a part of a mini-batch, `weight` is what as many samples weigh on average. The losses
        of all parts, each times its share of the samples, add up to that of the undivided
        mini-batch.
        """
        count = len(targets)
        unpacked = self._unpacked(targets)
        loss = self._mean(out, unpacked, count, weight)
        if torch.is_grad_enabled() and not loss.requires_grad and _has_graph(out):
            raise ValueError(
                "the loss gave a tensor without a gradient: let torch compute it from the output, "
                "without detach(), item() or a comparison"
            )
        each = self._each(out, unpacked, count) if self.each else None
        metric = self.metrics.get("accuracy")
        function: Any = metric.function if isinstance(metric, AllSamples) else metric
        if function is None or isinstance(function, Accumulating):
            return LossAndMetric(loss, None, each)
        scores = call_user_code("the metric 'accuracy'", function, detached(out), unpacked)
        return LossAndMetric(loss, training_sum(scores, count), each)

    def mean_of(self, out: Any, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """The loss alone, as a call gives it."""
        return self._mean(out, self._unpacked(targets), len(targets), weight)

    def _unpacked(self, targets: Tensor) -> Any:
        return targets if self.targets is None else self.targets.unpack(targets)

    def _mean(self, out: Any, unpacked: Any, count: int, weight: Tensor | None = None) -> Tensor:
        """The mean over these samples, or of a part of a mini-batch; 0 where nothing counts."""
        if self.weighted is None:
            return mean(call_user_code(self.named, self.loss, out, unpacked), count)
        values = mean(call_user_code(self.named, self.weighted, out, unpacked), count)
        total = denominator(self.named, self.weighted, unpacked)
        factor = total / (total if weight is None else weight).clamp_min(SMALLEST)
        return values * factor.to(values)

    def _each(self, out: Any, unpacked: Any, count: int) -> Tensor:
        """Loss of each of `count` samples, (count,), float32."""
        loss: Any = self.loss
        with suppress(TypeError, ValueError):  # without a signature there is no such argument
            if "reduction" in signature(loss).parameters:
                loss = partial(loss, reduction="none")
        with torch.no_grad():
            values = call_user_code(self.named, loss, detached(out), unpacked)
        if values.dim() == 0 or len(values) != count:
            raise ValueError(
                f"{self.named} gives a tensor of shape {tuple(values.shape)} for {count} samples, "
                "and the sampler learns from a loss of each: give one that takes reduction='none', "
                "or gives one row for each sample, or take sampler.name=uniform"
            )
        each: Tensor = values.float()
        return each.flatten(1).mean(1) if each.dim() > 1 else each

    @cached_property
    def accumulated(self) -> dict[str, Accumulating]:
        """The metrics that are no sums over batches."""
        return {k: v for k, v in self.metrics.items() if isinstance(v, Accumulating)}

    @property
    def sums(self) -> list[str]:
        """The names of what `measured` gives, in its order."""
        names = ("loss", *self.metrics)
        return [name for name in names if name not in self.accumulated]

    def measured(self, out: Any, targets: Tensor) -> Tensor:
        """Sums and weights (M, 2), in float64, of the loss and of the metrics that are sums."""
        count, device = len(targets), tree_leaves(out)[0].device
        unpacked = self._unpacked(targets)
        numbers: list[Tensor | float] = []
        for name in self.sums:
            if name == "loss":
                weight: Tensor | int = count
                if self.weighted is not None:
                    weight = denominator(self.named, self.weighted, unpacked)
                numbers += [self._mean(out, unpacked, count).double() * weight, weight]
            else:
                function: Any = self.metrics[name]
                scores = call_user_code(f"the metric {name!r}", function, out, unpacked)
                numbers += sum_and_weight(scores, count)
        wide = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in numbers]
        return torch.stack(wide).view(-1, 2) if wide else torch.zeros(0, 2)

    def accumulate(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Update metrics that accumulate by the tensors of each output, and its targets."""
        for tensors in batches:
            *leaves, targets = (tensor.detach().cpu() for tensor in tensors)
            unpacked = self._unpacked(targets)
            out = tree_unflatten(leaves, self.output)
            for name, metric in self.accumulated.items():
                call_user_code(f"the metric {name!r}", metric.update, out, unpacked)


def denominator(named: str, loss: Weighted, targets: Any) -> Tensor:
    """What targets weigh together, in float64; ValueError for what is no one number."""
    with user_code(f"the denominator of {named} fails on targets {described(targets)}"):
        weight = loss.denominator(targets)
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        raise ValueError(
            f"the denominator of {named} gave {described(weight)}: let it give a tensor of one "
            "number, the sum of the targets' weights"
        )
    return weight.detach().double().reshape(())


def _has_graph(out: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(out))


def mean(values: Tensor, count: int) -> Tensor:
    """The mean of losses, given as one for each of `count` samples or as their mean."""
    if not isinstance(values, Tensor):
        raise ValueError(f"the loss gave a {type(values).__name__}, not a tensor")
    if values.dim() == 0:
        return values
    if len(values) != count:
        raise ValueError(
            f"the loss gave a tensor of shape {tuple(values.shape)} for {count} samples: let it "
            "give their mean, or one row for each sample"
        )
    return values.mean()
