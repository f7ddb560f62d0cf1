"""The loss that a network computes itself, of targets among its inputs, as Hugging Face's do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hybrid.data.items import TARGETS
from hybrid.networks.blocks import Blocks
from hybrid.networks.calls import CallUnit
from hybrid.solvers.metrics import FAULTS, LEFT_OUT, Counted, right_answers
from hybrid.solvers.objective import whole_and_parts

MODEL = "model"
"""The name of the loss in settings."""


@dataclass(frozen=True)
class ModelLoss:
    """What an output holds as its `loss`: the mean over samples, or over those that count.

    `counts` says what it is divided by: samples, labels other than -100, or these without the first
    of each sample, which a causal language model does not predict. It must be finite where its
    denominator is 0, or have no gradient there, as torch's cross-entropy has none.
    """

    counts: Literal["samples", "labels", "shifted labels"] = "samples"

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss; 0 where nothing counts. ValueError for an output without one."""
        loss = loss_of(output)
        return torch.where(self.denominator(targets).to(loss.device) > 0, loss, 0.0)

    def denominator(self, targets: Any) -> Tensor:
        if self.counts == "samples":
            return torch.tensor(float(len(tree_leaves(targets)[0])), dtype=torch.float64)
        labels = targets[:, 1:] if self.counts == "shifted labels" else targets
        return (labels != LEFT_OUT).double().sum()


def loss_of(output: Any) -> Tensor:
    """The loss in a network's output: its `loss`, or the first of several tensors."""
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


def right_logits(output: Any, targets: Tensor) -> Tensor | Counted:
    """`right_answers` of the logits in an output."""
    return right_answers(logits_of(output), targets)


def logits_of(output: Any) -> Any:
    """The logits in the output of a network that has a loss of its own; None: there are none."""
    if isinstance(output, tuple | list):
        return output[1] if len(output) > 1 else None
    return output.get("logits") if isinstance(output, Mapping) else None


def takes_targets(blocks: Blocks) -> bool:
    """Whether the sample by which a network was cut holds targets."""
    first = blocks.units[0]
    if not isinstance(first, CallUnit) or first.calls is None:
        return False
    structure = first.calls.code.inputs.structure
    names = tree_unflatten(range(structure.num_leaves), structure)
    return isinstance(names, Mapping) and not names.keys().isdisjoint(TARGETS)


@dataclass(frozen=True)
class OfInputs:
    """A network's own loss as a function of the network's inputs, in evaluation mode."""

    blocks: Blocks
    loss: ModelLoss

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        return self.loss(self.blocks.compute_outputs(inputs), targets)

    def denominator(self, targets: Any) -> Tensor:
        return self.loss.denominator(targets)


def settle_own_loss(
    blocks: Blocks, inputs: Any, targets: Any
) -> tuple[ModelLoss, tuple[float, float] | None]:
    """The network's loss and what it divides by, found by trial.

    If it is none of the means that a `ModelLoss` can be: the loss of some samples, too, and the
    mean of theirs one by one. ValueError if the network has no loss.
    """
    ModelLoss()(blocks.compute_outputs(inputs), targets)
    for some, theirs in _variants(inputs, targets):
        try:
            if not OfInputs(blocks, ModelLoss())(some, theirs).isfinite():
                continue
        except FAULTS:  # it knows no targets that are left out
            continue
        differs = whole_and_parts(OfInputs(blocks, ModelLoss()), some, theirs)
        if differs is None:
            return ModelLoss(), None
        for counts in ("labels", "shifted labels") if theirs.dim() > 1 else ("labels",):
            loss = ModelLoss(counts)
            if whole_and_parts(OfInputs(blocks, loss), some, theirs) is None:
                return loss, None
        return ModelLoss(), differs
    return ModelLoss(), None


def _variants(inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
    """More of such samples, of which unlike numbers of labels and of tokens count."""
    rows = torch.arange(5) % len(tree_leaves(targets)[0])
    some, labels = tree_map(lambda x: x[rows], (inputs, targets))
    masked = some
    if isinstance(some, Mapping):
        masked = {k: _shortened(x) if "mask" in k else x for k, x in some.items()}
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        fewer = _left_out(labels)
        same = [isinstance(x, Tensor) and torch.equal(x, labels) for x in tree_leaves(some)]
        leaves, structure = tree_flatten(masked)
        changed = [fewer if is_label else x for x, is_label in zip(leaves, same, strict=True)]
        yield tree_unflatten(changed, structure), fewer
    yield masked, labels
    yield some, labels


def _left_out(labels: Tensor) -> Tensor:
    """Labels of 5 samples: all of the first are left as they are, none of the third."""
    if labels.dim() == 1:
        return labels.masked_fill(torch.tensor([False, False, True, False, True]), LEFT_OUT)
    length = labels.shape[1]
    kept = torch.tensor([length, 1, 0, (length + 1) // 2, max(1, length - 1)])
    beyond = torch.arange(length) >= kept[:, None]
    return labels.masked_fill(beyond.view(*beyond.shape, *[1] * (labels.dim() - 2)), LEFT_OUT)


def _shortened(mask: Any) -> Any:
    """A mask (5, L) with unlike numbers of tokens, at least one in each sample."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return mask
    length = mask.shape[1]
    kept = (torch.tensor([2, 4, 6, 5, 3]) * length // 6).clamp_min(1)
    return mask * (torch.arange(length) < kept[:, None])
