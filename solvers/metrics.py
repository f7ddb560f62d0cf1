"""Metrics: of each sample, with their mean, or of all samples of an evaluation at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

LEFT_OUT = -100
"""The class of samples that do not count."""


@runtime_checkable
class Accumulating(Protocol):
    """A metric that accumulates batch by batch, as those of torchmetrics do.

    Its tensors are on the CPU. It is reset before an evaluation and computed once, at its end.
    """

    def reset(self) -> Any:
        """Forget all samples."""

    def update(self, output: Any, targets: Any, /) -> Any:
        """Add a batch."""

    def compute(self) -> Any:
        """One number for all samples since `reset`."""


Function: TypeAlias = Callable[[Any, Any], Any]
Metric: TypeAlias = Function | Accumulating
"""A function (output, targets), or an object that accumulates.

A function that gives a score of each sample, (N,) or (N, ...), gets a batch at a time, and the mean
over all samples is taken. One that gives a number, which need not be a mean, gets all samples of an
evaluation at once, on the CPU.
"""


class Counted(NamedTuple):
    """A sum and its weight, where that is not the number of samples."""

    sum: Tensor
    weight: Tensor


def right_answers(out: Tensor, targets: Tensor) -> Tensor | Counted:
    """Which of the logits (N, classes, ...) are largest at their class (N, ...).

    If there are samples that do not count (class -100, as in cross-entropy), the number of hits.
    """
    right, counts = out.argmax(1) == targets, targets != LEFT_OUT
    if not targets.is_cuda and bool(counts.all()):  # on a GPU the host would have to wait
        return right
    return Counted(right.sum(), counts.sum())


def right_logits(output: Any, targets: Tensor) -> Tensor | Counted:
    """`right_answers` of the logits in an output."""
    return right_answers(logits_of(output), targets)


def logits_of(output: Any) -> Any:
    """The logits in the output of a network that has a loss of its own; None: there are none."""
    if isinstance(output, tuple | list):
        return output[1] if len(output) > 1 else None
    return output.get("logits") if isinstance(output, Mapping) else None


class AllSamples:
    """Accumulates all outputs and targets for a function that gives one number."""

    def __init__(self, name: str, function: Function) -> None:
        self.name, self.function = name, function
        self._met: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        self._met = []

    def update(self, output: Any, targets: Any, /) -> None:
        self._met.append((output, targets))

    def compute(self) -> Any:
        out, targets = (tree_map(_joined, *batches) for batches in zip(*self._met, strict=True))
        return call_user_code(f"the metric {self.name!r}", self.function, out, targets)


def _joined(*parts: Tensor) -> Tensor:
    """Rows of batches together; of one number for each, such as a loss, their mean."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).mean()


def tried_metrics(metrics: Mapping[str, Metric], out: Any, targets: Any) -> dict[str, Metric]:
    """The metrics after a trial on a few samples: functions of one number will get all at once.

    ValueError, with the reason, for what is no metric.
    """
    out = detached(out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few samples may lack a class
        return {name: _tried(name, metric, out, targets) for name, metric in metrics.items()}


def _tried(name: str, metric: Metric, out: Any, targets: Any) -> Metric:
    if isinstance(metric, type):
        kind = metric.__name__
        raise ValueError(f"the metric {name!r} is the class {kind}: give an object, {kind}(...)")
    if not isinstance(metric, Accumulating):
        scores = call_user_code(f"the metric {name!r}", metric, out, targets)
        if isinstance(scores, Counted) or _tensor(scores).dim():
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
    """Let an evaluation begin; ValueError if that fails."""
    with user_code(f"the metric {name!r} fails in reset"):
        metric.reset()


def evaluated(name: str, metric: Accumulating) -> float:
    """The result of an evaluation; ValueError if that fails, or is not one number."""
    with user_code(f"the metric {name!r} fails in compute"):
        result = metric.compute()
    return one_number(name, result)


def one_number(name: str, result: Any) -> float:
    """As a float; ValueError if it is none."""
    try:
        return float(torch.as_tensor(result))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"the metric {name!r} gives {described(result)}: it must give one number; to measure "
            "several, give each a metric and a name"
        ) from None


def sum_and_weight(scores: Any, count: int) -> tuple[Tensor, Tensor | int]:
    """The sum of scores, (N,) or (N, ...), over the samples, and the weight of that sum."""
    if isinstance(scores, Counted):
        return scores
    values = _tensor(scores)
    if values.dim() == 0 or len(values) != count:
        raise ValueError(
            f"a metric gave shape {tuple(values.shape)} for {count} samples: let it give one row "
            "for each sample, or one number for all of them"
        )
    return values.sum() if values.dim() == 1 else values.flatten(1).double().mean(1).sum(), count


def training_sum(scores: Any, count: int) -> Tensor:
    """The sum of scores over a mini-batch in training, as if all samples weighed the same.

    One number counts as the mean over the samples.
    """
    if isinstance(scores, Counted):
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
"""What a user's code raises by mistake; torch uses some other exceptions to leave a forward."""


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn an error of a user's code into a ValueError, behind `what` failed."""
    try:
        yield
    except FAULTS as error:
        raise ValueError(f"{what}: {failure(error)}") from error


def call_user_code(what: str, function: Callable[[Any, Any], Any], out: Any, targets: Any) -> Any:
    """The value of a loss or a metric; ValueError with the shapes of its arguments if it fails."""
    try:
        return function(out, targets)
    except FAULTS as error:
        raise ValueError(
            f"{what} fails on output {described(out)} and targets {described(targets)}: "
            f"{failure(error)}{_remedy(out)}"
        ) from error


def _remedy(out: Any) -> str:
    """For an output that holds its logits by name, as Hugging Face's models give it."""
    if not ("logits" in out if isinstance(out, Mapping) else hasattr(out, "logits")):
        return ""
    return (
        "; put the labels into the sample= of split, and the network computes its loss itself, or "
        "give loss=lambda output, targets: ... of output.logits"
    )


def described(value: Any) -> str:
    """The shapes and types of tensors, and the classes of what is none, for an error message."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if any(leaf is value for leaf in tree_leaves(value)):
        return type(value).__name__
    return str(tree_map(described, value))


def failure(error: Exception) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason'])[0]}"


def detached(out: Any) -> Any:
    """An output without its graph."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
