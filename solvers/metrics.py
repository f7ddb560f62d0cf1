"""Metrics: a score of each sample, or one number for all samples of an evaluation."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

LEFT_OUT = -100
"""The class of samples to ignore."""


@runtime_checkable
class Accumulating(Protocol):
    """A metric that accumulates batch by batch, like those of torchmetrics.

    Its tensors are on the CPU. It is reset before an evaluation and computed once, at the end.
    """

    def reset(self) -> Any:
        """Forget all samples."""

    def update(self, output: Any, targets: Any, /) -> Any:
        """Add a batch."""

    def compute(self) -> Any:
        """Return one number for all samples since `reset`."""


Function: TypeAlias = Callable[[Any, Any], Any]
Metric: TypeAlias = Function | Accumulating
"""A function (output, targets), or an object that accumulates.

A function that returns a score of each sample, (N,) or (N, ...), gets one batch at a time, and the
mean over all samples is taken. A function that returns one number, which need not be a mean, gets
all samples of an evaluation at once, on the CPU.
"""


class WeightedSum(NamedTuple):
    """A sum and its weight, if that is not the number of samples."""

    sum: Tensor
    weight: Tensor


def right_answers(out: Tensor, targets: Tensor) -> Tensor | WeightedSum:
    """Return which logits (N, classes, ...) are largest at their class (N, ...).

    With samples to ignore (class -100, as in cross-entropy), return the number of hits.
    """
    right, counts = out.argmax(1) == targets, targets != LEFT_OUT
    if not targets.is_cuda and bool(counts.all()):  # on a GPU this would synchronize
        return right
    return WeightedSum(right.sum(), counts.sum())


def right_logits(output: Any, targets: Tensor) -> Tensor | WeightedSum:
    """Return `right_answers` of the logits in an output."""
    return right_answers(logits_of(output), targets)


def logits_of(output: Any) -> Any:
    """Return the logits in the output of a network with its own loss; None if there are none."""
    if isinstance(output, tuple | list):
        return output[1] if len(output) > 1 else None
    return output.get("logits") if isinstance(output, Mapping) else None


class AllSamples:
    """Accumulates all outputs and targets for a function that gives one number."""

    def __init__(self, name: str, function: Function) -> None:
        self.name, self.function = name, function
        self._batches: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        self._batches = []

    def update(self, output: Any, targets: Any, /) -> None:
        self._batches.append((output, targets))

    def compute(self) -> Any:
        out, targets = (tree_map(_joined, *batches) for batches in zip(*self._batches, strict=True))
        return call_user_code(f"the metric {self.name!r}", self.function, out, targets)


def _joined(*parts: Tensor) -> Tensor:
    """Concatenate batches; average a number for each batch, such as a loss."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).mean()


def try_metrics(metrics: Mapping[str, Metric], out: Any, targets: Any) -> dict[str, Metric]:
    """Try metrics on a few samples; wrap functions that return one number in `AllSamples`.

    ValueError, with the reason, for anything that is not a metric.
    """
    out = detached(out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few samples may lack a class
        return {name: _try_metric(name, metric, out, targets) for name, metric in metrics.items()}


def _try_metric(name: str, metric: Metric, out: Any, targets: Any) -> Metric:
    if isinstance(metric, type):
        kind = metric.__name__
        raise ValueError(f"the metric {name!r} is the class {kind}: give an object, {kind}(...)")
    if not isinstance(metric, Accumulating):
        scores = call_user_code(f"the metric {name!r}", metric, out, targets)
        if isinstance(scores, WeightedSum) or _tensor(scores).dim():
            return metric
        return AllSamples(name, metric)
    reset(name, metric)
    call_user_code(f"the metric {name!r}", metric.update, out, targets)
    result: Any = 0.0
    with suppress(*FAULTS):  # a few samples may be too few
        result = metric.compute()
    one_number(name, result)
    reset(name, metric)
    return metric


def reset(name: str, metric: Accumulating) -> None:
    """Reset a metric before an evaluation; ValueError if that fails."""
    with user_code(f"the metric {name!r} fails in reset"):
        metric.reset()


def compute(name: str, metric: Accumulating) -> float:
    """Compute the result of an evaluation; ValueError if that fails, or is not one number."""
    with user_code(f"the metric {name!r} fails in compute"):
        result = metric.compute()
    return one_number(name, result)


def one_number(name: str, result: Any) -> float:
    """Convert a metric's result to a float; ValueError if it is not one number."""
    try:
        return float(torch.as_tensor(result))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"the metric {name!r} gives {described(result)}: it must give one number; to measure "
            "several, give each a metric and a name"
        ) from None


def sum_and_weight(scores: Any, count: int) -> tuple[Tensor, Tensor | int]:
    """Sum scores, (N,) or (N, ...), over samples; return the sum and its weight."""
    if isinstance(scores, WeightedSum):
        return scores
    values = _tensor(scores)
    if values.dim() == 0 or len(values) != count:
        raise ValueError(
            f"a metric gave shape {tuple(values.shape)} for {count} samples: let it give one row "
            "for each sample, or one number for all of them"
        )
    return values.sum() if values.dim() == 1 else values.flatten(1).double().mean(1).sum(), count


def training_sum(scores: Any, count: int) -> Tensor:
    """Sum scores over a training mini-batch, as if all samples weighed the same.

    A single number counts as the mean over the samples.
    """
    if isinstance(scores, WeightedSum):
        return scores.sum.double() / scores.weight.clamp_min(1) * count
    values = _tensor(scores)
    return sum_and_weight(values, count)[0] if values.dim() else values * count


def _tensor(scores: Any) -> Tensor:
    try:
        return torch.as_tensor(scores)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"a metric gave {str(scores)[:40]!r}: it must give a tensor or a number"
        ) from None


FAULTS = (
    *(RuntimeError, TypeError, ValueError, AttributeError),
    *(LookupError, ArithmeticError, AssertionError, OSError),
)
"""Exceptions of faulty user code; torch uses some others to leave a forward pass early."""


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise ValueError for an error of user code; `what` failed begins the message."""
    try:
        yield
    except FAULTS as error:
        raise ValueError(f"{what}: {failure(error)}") from error


def call_user_code(what: str, function: Callable[[Any, Any], Any], out: Any, targets: Any) -> Any:
    """Call a loss or a metric; ValueError with the shapes of its arguments if it fails."""
    try:
        return function(out, targets)
    except FAULTS as error:
        raise ValueError(
            f"{what} fails on output {described(out)} and targets {described(targets)}: "
            f"{failure(error)}{_remedy(out)}"
        ) from error


def _remedy(out: Any) -> str:
    """Suggest a remedy for an output that holds logits by name, as in Hugging Face's models."""
    if not ("logits" in out if isinstance(out, Mapping) else hasattr(out, "logits")):
        return ""
    return (
        "; put the labels into the sample= of split, and the network computes its loss itself, or "
        "give loss=lambda output, targets: ... of output.logits"
    )


def described(value: Any) -> str:
    """Describe tensors by shape and dtype, and other values by class, for an error message."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if any(leaf is value for leaf in tree_leaves(value)):
        return type(value).__name__
    return str(tree_map(described, value))


def failure(error: Exception) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason'])[0]}"


def detached(out: Any) -> Any:
    """Detach the tensors of an output."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
