"""The loss and the metrics of a training, tried out before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from hybrid.data import Data
from hybrid.data.mixing import Mix, shapes
from hybrid.data.samplers.base import Learning
from hybrid.networks.blocks import Blocks
from hybrid.solvers.acting import unknown
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.metrics import LEFT_OUT, detached, right_answers, tried_metrics
from hybrid.solvers.objective import (
    Loss,
    Objective,
    OverClasses,
    check_mean,
    weighted,
    whole_and_parts,
)

if TYPE_CHECKING:
    from hybrid.method.training_options import Options

LOSSES: Mapping[str, Loss] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}
TRIED = 2
"""The number of samples to try them on."""
MOST_CLASSES = 64
"""Whose losses are compared, one by one and together."""


class Objectives(NamedTuple):
    """The objectives of training and test mini-batches, and what mixes the former."""

    training: Objective
    test: Objective
    mix: Mix | None
    output: tuple[int, ...] | None
    """The shape of one sample's output; None: several tensors."""
    undivided: str = ""
    """How the loss of a mini-batch differs from that of its parts; empty: it does not."""

    @classmethod
    def settle(cls, options: Options, blocks: Blocks, train: Data, test: Data) -> Objectives:
        """ValueError, with the reason, for a loss or a metric that fails on outputs and targets."""
        loss, smoothed = _losses(options)
        mix, (inputs, targets) = None, train.sample(TRIED)
        if options.batch_transform is not None:
            mix, inputs, targets = Mix.of(options.batch_transform, train, TRIED)
        given, expected = test.sample(TRIED)
        if shapes(given) != shapes(inputs):
            raise ValueError(
                f"training inputs have shape {shapes(inputs)}, those of the test {shapes(given)}: "
                "give both alike"
            )
        out = tree_map(_leaf, blocks.compute_outputs(inputs))
        named = "the loss" if options.loss else f"the loss {options.train.loss!r}"

        if "loss" in (options.metrics or {}):
            raise ValueError("metrics has 'loss', which the loss is called: give it another name")

        def objective(
            loss: Loss, targets: Any, answers: Bundle | None, each: bool = False
        ) -> Objective:
            metrics = options.metrics
            if metrics is None:  # accuracy, where the output has a logit for each class
                metrics = {"accuracy": right_answers} if _classes(out, targets) else {}
            _check_shapes(options, loss, out, targets)
            metrics = tried_metrics(metrics, out, targets)
            made = Objective(loss, metrics, answers, named, each, tree_structure(out))
            packed = targets if answers is None else answers.pack(targets)
            made(out, packed)
            made.measured(detached(out), packed)
            return made

        packing = train.answers if mix is None else mix.answers
        training = objective(smoothed, targets, packing, isinstance(options.sampler, Learning))
        check_mean(named, loss, out, targets)
        tested = objective(loss, expected, test.answers)
        classified = loss is nn.functional.cross_entropy
        train.expect_classes(_classes(out, targets) if classified and mix is None else 0)
        test.expect_classes(_classes(out, expected) if classified else 0)
        output = tuple(out.shape[1:]) if isinstance(out, Tensor) else None
        undivided = _undivided(named, loss, out, targets)
        training = replace(training, alike=mix is None and _alike(smoothed, train))
        tested = replace(tested, splits=not undivided, alike=_alike(loss, test))
        return cls(training, tested, mix, output, undivided)


def _losses(options: Options) -> tuple[Loss, Loss]:
    """The loss, and the same with smoothed labels, for training."""
    name, smoothing = options.train.loss, options.train.label_smoothing
    if options.loss is None and name not in LOSSES:
        raise ValueError(unknown(name, LOSSES, "loss"))
    loss = options.loss or LOSSES[name]
    if not smoothing:
        return loss, loss
    if loss is not nn.functional.cross_entropy:
        what = "loss= is given" if options.loss else f"train.loss is {name!r}"
        raise ValueError(
            f"train.label_smoothing is {smoothing}, but {what}, which has no smoothing: leave "
            "it out"
        )
    return loss, partial(nn.functional.cross_entropy, label_smoothing=smoothing)


def _check_shapes(options: Options, loss: Loss, out: Any, targets: Any) -> None:
    """ValueError where torch would spread the targets over the output, with a warning at most."""
    name = next((name for name, known in LOSSES.items() if known is loss), "")
    tensors = isinstance(out, Tensor) and isinstance(targets, Tensor)
    if name in ("", "cross-entropy") or not tensors or out.shape[1:] == targets.shape[1:]:
        return
    what = "loss= is torch's" if options.loss else "train.loss is"
    classes = "cross-entropy, which takes classes, or " if _classes(out, targets) > 1 else ""
    raise ValueError(
        f"{what} {name!r}, which compares numbers one by one, but a sample's output has shape "
        f"{tuple(out.shape[1:])} and its target {tuple(targets.shape[1:])}: choose {classes}"
        "targets of the output's shape"
    )


def _classes(out: Any, targets: Any) -> int:
    """The number of classes of the output's logits; 0 where the targets are no classes."""
    if not (isinstance(out, Tensor) and isinstance(targets, Tensor)):
        return 0
    classes = targets.dtype is torch.int64 and out.dim() == targets.dim() + 1
    return out.shape[1] if classes and out.shape[:1] + out.shape[2:] == targets.shape else 0


def _undivided(named: str, loss: Loss, out: Any, targets: Any) -> str:
    """How the loss of several samples differs from that of their parts; empty: it does not."""
    found = whole_and_parts(loss, *_varied(out, targets))
    if found is None:
        return ""
    whole, parts = found
    return f"{named} of a few samples is {whole:.4g}, and the mean of theirs one by one {parts:.4g}"


def _alike(loss: Loss, data: Data) -> bool:
    """Whether all targets of the data weigh alike, in a loss that could weigh them."""
    known = weighted(loss)
    if not isinstance(known, OverClasses) or known.class_weights is not None:
        return False
    return not data.leaves_out(known.left_out)


def _varied(out: Any, targets: Any) -> tuple[Any, Any]:
    """More of such outputs and targets, with every class among these, where they are classes."""
    classes = _classes(out, targets)
    rows = torch.arange(max(4, min(classes, MOST_CLASSES))) % len(tree_leaves(targets)[0])
    out, targets = tree_map(
        lambda x: x[rows.to(x.device)] if isinstance(x, Tensor) and x.dim() else x, (out, targets)
    )
    if classes:
        others = torch.arange(targets.numel(), device=targets.device) % classes
        targets = torch.where(targets == LEFT_OUT, targets, others.view_as(targets))
    return out, targets


def _leaf(x: Any) -> Any:
    """A tensor as training gives it to the loss: with a gradient."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return x.detach().requires_grad_().clone()  # of which a loss may write to the copy
