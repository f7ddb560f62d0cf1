"""The loss and the metrics of a network's output and targets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from threading import Lock
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

_MOVING = Lock()
SMALLEST = torch.finfo(torch.float64).tiny


@runtime_checkable
class Weighted(Protocol):
    r"""A loss that is a weighted mean with a known denominator.

        loss = (sum_i v_i l_i) / (sum_i v_i)

    The weights depend on the targets alone, so a mini-batch's denominator is known before the first
    backward pass of its parts. The gradients of the parts then add up to that of the undivided
    mini-batch. If all weights are 0, the loss must be finite.
    """

    def __call__(self, output: Any, targets: Any, /) -> Tensor:
        """Compute the weighted mean."""

    def denominator(self, targets: Any, /) -> Tensor:
        """Compute sum_i v_i, a tensor of one number."""


@dataclass(frozen=True)
class OverClasses:
    """torch's cross-entropy or NLL loss; v_i is the weight of the target's class, 0 if ignored."""

    loss: Loss
    class_weights: Tensor | None = None
    left_out: int = -100
    """`ignore_index`."""

    def __call__(self, output: Any, targets: Any) -> Tensor:
        if not _are_classes(targets):
            return self.loss(output, targets)
        # if all weights are 0, torch divides by 0: take any class that counts, its weight is 0 here
        classes = torch.arange(output.shape[1], device=targets.device)
        weights = 1.0 if self.class_weights is None else self.class_weights.to(targets.device)
        counting = ((classes != self.left_out) * weights).argmax()
        return self.loss(output, torch.where(self.denominator(targets) > 0, targets, counting))

    def denominator(self, targets: Any) -> Tensor:
        """Sum the weights of the targets' classes in float64; for probabilities, count samples."""
        if not _are_classes(targets):
            return torch.tensor(float(len(targets)), dtype=torch.float64)
        counts: Tensor = targets != self.left_out
        if self.class_weights is None:
            return counts.double().sum()
        weights: Tensor = self.class_weights.to(targets.device)[torch.where(counts, targets, 0)]
        return torch.where(counts, weights.double(), 0.0).sum()


Counts = Literal["samples", "labels", "shifted labels"]
"""The terms of a mean: samples, labels that are not ignored, or these without the first label of
each sample, which a causal language model does not predict."""


@dataclass(frozen=True)
class DividedBy:
    """A loss that is a weighted mean, with a denominator that its user declares.

    If all weights are 0, the loss is 0 and must have no gradient, like torch's losses.
    """

    loss: Loss
    sum_of_weights: Callable[[Any], Any]
    """targets -> sum_i v_i, a tensor of one number or a number."""

    def __call__(self, output: Any, targets: Any) -> Tensor:
        loss = self.loss(output, targets)
        weight = self.denominator(targets)
        counts = weight.to(loss.device, non_blocking=True) > 0
        return torch.where(counts, loss, torch.zeros_like(loss))

    def denominator(self, targets: Any) -> Tensor:
        weight = self.sum_of_weights(targets)
        return weight if isinstance(weight, Tensor) else torch.tensor(weight, dtype=torch.float64)


@dataclass(frozen=True)
class CountOf:
    """Counts the samples or labels of targets (N, ...) that a mean is over."""

    what: Counts
    left_out: int = LEFT_OUT
    """The label to ignore."""

    def __call__(self, targets: Any) -> Tensor:
        first = tree_leaves(targets)[0]
        if self.what == "samples":
            return torch.tensor(float(len(first)), dtype=torch.float64)
        labels: Tensor = first[:, 1:] if self.what == "shifted labels" else first
        return (labels != self.left_out).double().sum()


def loss_of(output: Any, targets: Any = None) -> Tensor:
    """Return the loss in a network's output: its `loss`, or the first of several tensors."""
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
    """Return a loss that is known to be a weighted mean; None: all samples weigh the same."""
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


def on_device(loss: Any, device: torch.device) -> Any:
    """Return a loss with its weights on a device, where else every call would move them.

    torch's losses and partial functions are copied; a module of another class, which may share its
    tensors, is moved, unless another thread has it on its GPU.
    """
    if isinstance(loss, DividedBy):
        return replace(loss, loss=on_device(loss.loss, device))
    if isinstance(loss, partial):
        tensors = {k: v.to(device) for k, v in loss.keywords.items() if isinstance(v, Tensor)}
        return partial(loss, **tensors) if tensors else loss
    with _MOVING:
        held = [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []
        if all(tensor.device == device or tensor.requires_grad for tensor in held):
            return loss
        is_copied = type(loss).__module__.startswith("torch.") or any(x.is_cuda for x in held)
        return (deepcopy(loss) if is_copied else loss).to(device)


class LossCheck(Protocol):
    """Checks on the last block that the loss of a mini-batch is the mean of its parts' losses."""

    def take(self, part: Any, lam: Tensor, out: Any, loss: Tensor) -> None:
        """Add a micro-batch with the block's input, output and loss; ValueError if it fails."""


@dataclass(frozen=True)
class Objective:
    """A loss, and metrics by name; the metric "accuracy" is also measured in training."""

    loss: Loss = nn.functional.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": right_answers})
    targets: Bundle | None = None
    """The bundle of the targets, if they are not one tensor."""
    title: str = "the loss"
    """The loss in error messages."""
    each: bool = False
    """Whether the loss of each sample is needed, besides their mean."""
    output: TreeSpec = field(default_factory=lambda: tree_structure(0))
    """The structure of the network's output."""
    equal_weights: bool = False
    """Whether all targets are known to have the same weight in the loss."""

    def on(self, device: torch.device) -> "Objective":
        loss = on_device(self.loss, device)
        return self if loss is self.loss else replace(self, loss=loss)

    @cached_property
    def weighted(self) -> Weighted | None:
        """The loss, if it is a weighted mean."""
        return None if self.equal_weights else weighted(self.loss)

    def weight(self, targets: Tensor) -> Tensor | None:
        """Sum the targets' weights in the loss; None: all samples weigh the same."""
        if self.weighted is None:
            return None
        return denominator(self.title, self.weighted, self._unpacked(targets))

    def __call__(self, out: Any, targets: Tensor, weight: Tensor | None = None) -> LossAndMetric:
        """Compute the mean loss with its graph, and the metric of training.

        For a part of a mini-batch, `weight` is the average weight of that number of samples. The
        losses of all parts, each times its share of the samples, add up to that of the undivided
        mini-batch.
        """
        count = len(targets)
        unpacked = self._unpacked(targets)
        loss = self._mean(out, unpacked, count, weight)
        outputs = (x for x in tree_leaves(out) if isinstance(x, Tensor))
        has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in outputs)
        if has_graph and not loss.requires_grad:
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
        """Compute the loss of a call alone."""
        return self._mean(out, self._unpacked(targets), len(targets), weight)

    def _unpacked(self, targets: Tensor) -> Any:
        return targets if self.targets is None else self.targets.unpack(targets)

    def _mean(self, out: Any, unpacked: Any, count: int, weight: Tensor | None = None) -> Tensor:
        """Compute the mean over samples, or a part's term of it; 0 if all weights are 0."""
        if self.weighted is None:
            return mean(call_user_code(self.title, self.loss, out, unpacked), count)
        values = mean(call_user_code(self.title, self.weighted, out, unpacked), count)
        total = denominator(self.title, self.weighted, unpacked)
        factor = total / (total if weight is None else weight).clamp_min(SMALLEST)
        return values * factor.to(values, non_blocking=True)

    def _each(self, out: Any, unpacked: Any, count: int) -> Tensor:
        """Compute the loss of each of `count` samples, (count,), float32."""
        loss: Any = self.loss
        with suppress(TypeError, ValueError):  # some callables have no signature
            if "reduction" in signature(loss).parameters:
                loss = partial(loss, reduction="none")
        with torch.no_grad():
            values = call_user_code(self.title, loss, detached(out), unpacked)
        if values.dim() == 0 or len(values) != count:
            raise ValueError(
                f"{self.title} gives a tensor of shape {tuple(values.shape)} for {count} samples, "
                "and the sampler learns from a loss of each: give one that takes reduction='none', "
                "or gives one row for each sample, or take sampler.name=uniform"
            )
        each: Tensor = values.float()
        return each.flatten(1).mean(1) if each.dim() > 1 else each

    @cached_property
    def accumulated(self) -> dict[str, Accumulating]:
        """The metrics that accumulate over batches."""
        return {k: v for k, v in self.metrics.items() if isinstance(v, Accumulating)}

    @property
    def sums(self) -> list[str]:
        """The names of the rows of `measured`, in order."""
        names = ("loss", *self.metrics)
        return [name for name in names if name not in self.accumulated]

    def measured(self, out: Any, targets: Tensor) -> Tensor:
        """Compute sums and weights (M, 2), in float64, of the loss and the metrics in `sums`."""
        count, device = len(targets), tree_leaves(out)[0].device
        unpacked = self._unpacked(targets)
        numbers: list[Tensor | float] = []
        for name in self.sums:
            if name == "loss":
                weight: Tensor | int = count
                if self.weighted is not None:
                    weight = denominator(self.title, self.weighted, unpacked)
                numbers += [self._mean(out, unpacked, count).double() * weight, weight]
            else:
                function: Any = self.metrics[name]
                scores = call_user_code(f"the metric {name!r}", function, out, unpacked)
                numbers += sum_and_weight(scores, count)
        wide = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in numbers]
        return torch.stack(wide).view(-1, 2) if wide else torch.zeros(0, 2)

    def accumulate(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Update accumulating metrics with batches: the tensors of each output, and its targets."""
        for tensors in batches:
            *leaves, targets = (tensor.detach().cpu() for tensor in tensors)
            unpacked = self._unpacked(targets)
            out = tree_unflatten(leaves, self.output)
            for name, metric in self.accumulated.items():
                call_user_code(f"the metric {name!r}", metric.update, out, unpacked)


def denominator(title: str, loss: Weighted, targets: Any) -> Tensor:
    """Sum the weights of targets, in float64; ValueError if the loss gives no single number."""
    with user_code(f"the denominator of {title} fails on targets {described(targets)}"):
        weight = loss.denominator(targets)
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        raise ValueError(
            f"the denominator of {title} gave {described(weight)}: let it give a tensor of one "
            "number, the sum of the targets' weights"
        )
    return weight.detach().double().reshape(())


def mean(values: Tensor, count: int) -> Tensor:
    """Average losses: one for each of `count` samples, or their mean already."""
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
