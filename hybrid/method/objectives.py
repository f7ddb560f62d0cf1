"""The loss and the metrics of a training, tried out before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from hybrid.data import Data
from hybrid.data.items import TARGETS
from hybrid.data.mixing import Mix, shapes
from hybrid.data.samplers.base import Learning
from hybrid.networks.blocks import Blocks
from hybrid.networks.calls import CallUnit
from hybrid.rounds.phase_report import LINE_KEYS
from hybrid.solvers.acting import unknown
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.metrics import (
    FAULTS,
    LEFT_OUT,
    AllSamples,
    Metric,
    detached,
    logits_of,
    right_answers,
    right_logits,
    tried_metrics,
)
from hybrid.solvers.objective import (
    Loss,
    ModelLoss,
    Objective,
    OverClasses,
    check_mean,
    rows_of,
    weighted,
    whole_and_parts,
)

if TYPE_CHECKING:
    from hybrid.method.training_options import Options

MODEL = "model"
"""The name of a network's own loss in settings."""
LOSSES: Mapping[str, Loss] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
    MODEL: ModelLoss(),
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
    left_out: tuple[int, ...] = ()
    """Targets with which it does, as the loss leaves them out without naming its denominator."""

    @classmethod
    def settle(cls, options: Options, blocks: Blocks, train: Data, test: Data) -> Objectives:
        """ValueError, with the reason, for a loss or a metric that fails on outputs and targets."""
        loss, smoothed = _losses(options)
        mix, (inputs, targets) = None, train.sample(TRIED)
        if options.batch_transform is not None:
            mix, inputs, targets = Mix.of(options.batch_transform, train, TRIED)
        given, expected = test.sample(TRIED)
        if not _of_lengths(given, inputs, [*train.others, *test.others]):
            raise ValueError(
                f"training inputs have shape {shapes(inputs)}, those of the test {shapes(given)}: "
                "give both alike"
            )
        out = tree_map(_leaf, blocks.compute_outputs(inputs))
        named = "the loss" if options.loss else f"the loss {options.train.loss!r}"
        undivided = ""
        left_out: tuple[int, ...] = ()
        if isinstance(loss, ModelLoss):
            named = "the network's own loss"
            loss, differs = settle_own_loss(blocks, inputs, targets)
            smoothed, undivided = loss, _unlike(named, differs)
            check_mean(named, OfInputs(blocks, loss), inputs, targets)
        else:
            check_mean(named, loss, out, targets)
        measured = test.metrics if options.metrics is None else options.metrics
        for name in (name for name in measured or {} if name in LINE_KEYS):
            raise ValueError(
                f"metrics has {name!r}, which is something else in metrics.jsonl: give it another "
                "name"
            )

        def objective(
            loss: Loss, out: Any, targets: Any, answers: Bundle | None, each: bool = False
        ) -> Objective:
            metrics = measured
            if metrics is None:
                metrics = _default_metrics(loss, out, targets)
            _check_shapes(options, loss, out, targets)
            metrics = tried_metrics(metrics, out, targets)
            made = Objective(loss, metrics, answers, named, each, tree_structure(out))
            packed = targets if answers is None else answers.pack(targets)
            made(out, packed)
            made.measured(detached(out), packed)
            return made

        packing = train.answers if mix is None else mix.answers
        learns = isinstance(options.sampler, Learning)
        training = objective(smoothed, out, targets, packing, learns)
        tested_out = out
        if shapes(given) != shapes(inputs):
            tested_out = tree_map(_leaf, blocks.compute_outputs(given))
        tested = objective(loss, tested_out, expected, test.answers)
        classified = loss is nn.functional.cross_entropy
        train.expect_classes(_classes(out, targets) if classified and mix is None else 0)
        test.expect_classes(_classes(out, expected) if classified else 0)
        output = tuple(out.shape[1:]) if isinstance(out, Tensor) else None
        if not isinstance(loss, ModelLoss):
            undivided = _unlike(named, whole_and_parts(loss, *_varied(out, targets)))
            left_out = () if undivided else _find_left_out(loss, out, targets)
            tested = replace(tested, splits=not undivided or test.varies)
        training = replace(training, alike=mix is None and _alike(smoothed, train))
        tested = replace(tested, alike=_alike(loss, test))
        _check_at_once(tested, blocks, test)
        return cls(training, tested, mix, output, undivided, left_out)


def _check_at_once(tested: Objective, blocks: Blocks, test: Data) -> None:
    """ValueError for what needs all outputs of a test in one tensor, if their lengths differ."""
    names = [k for k, metric in tested.accumulated.items() if isinstance(metric, AllSamples)]
    if not names or not test.varies:
        return
    outputs = [blocks.compute_outputs(x) for x, _ in [test.sample(TRIED), *test.others]]
    if len({str(tree_map(lambda x: x.shape[1:], out)) for out in outputs}) > 1:
        raise ValueError(
            f"{names[0]!r} is one number of all outputs of the test, which have several lengths: "
            "give one row for each sample, or an object with update, compute and reset; or pad to "
            "a fixed length (padding='max_length')"
        )


def _of_lengths(given: Any, inputs: Any, others: Sequence[tuple[Any, Any]]) -> bool:
    """Whether inputs differ from others in shape by lengths alone that are known to vary."""
    if tree_structure(given) != tree_structure(inputs):
        return False
    known = [[x.shape[1:] for x in tree_leaves(each)] for each in (inputs, *(x for x, _ in others))]
    for i, x in enumerate(tree_leaves(given)):
        if x.dim() != len(known[0][i]) + 1:
            return False
        for n, *lengths in zip(x.shape[1:], *(each[i] for each in known), strict=True):
            if n != lengths[0] and len({*lengths}) == 1:
                return False
    return True


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


def _default_metrics(loss: Loss, out: Any, targets: Any) -> Mapping[str, Metric]:
    """The accuracy, where the output has a logit for each class."""
    if isinstance(loss, ModelLoss):
        return {"accuracy": right_logits} if _classes(logits_of(out), targets) else {}
    return {"accuracy": right_answers} if _classes(out, targets) else {}


def _unlike(named: str, differs: tuple[float, float] | None) -> str:
    """How the loss of several samples differs from that of their parts; empty: it does not."""
    if differs is None:
        return ""
    whole, parts = differs
    return f"{named} of a few samples is {whole:.4g}, and the mean of theirs one by one {parts:.4g}"


def _find_left_out(loss: Loss, out: Any, targets: Any) -> tuple[int, ...]:
    """The targets that a loss leaves out of its mean, of those that usually are."""
    labels = [x for x in tree_leaves(targets) if not x.is_floating_point()]
    if not labels or weighted(loss) is not None:
        return ()
    some, theirs = rows_of((out, targets), torch.arange(5) % len(labels[0]))

    def without(value: int) -> Any:
        return tree_map(lambda x: x if x.is_floating_point() else _left_out(x, value), theirs)

    values = (LEFT_OUT, -1, 0)
    return tuple(v for v in values if whole_and_parts(loss, some, without(v)) is not None)


def _alike(loss: Loss, data: Data) -> bool:
    """Whether all targets of the data weigh alike, in a loss that could weigh them."""
    if isinstance(loss, ModelLoss):
        return loss.counts == "samples" or not data.leaves_out(LEFT_OUT)
    known = weighted(loss)
    if not isinstance(known, OverClasses) or known.class_weights is not None:
        return False
    return not data.leaves_out(known.left_out)


def _varied(out: Any, targets: Any) -> tuple[Any, Any]:
    """More of such outputs and targets, with every class among these, where they are classes."""
    classes = _classes(out, targets)
    rows = torch.arange(max(4, min(classes, MOST_CLASSES))) % len(tree_leaves(targets)[0])
    out, targets = rows_of((out, targets), rows)
    if classes:
        others = torch.arange(targets.numel(), device=targets.device) % classes
        targets = torch.where(targets == LEFT_OUT, targets, others.view_as(targets))
    return out, targets


def _leaf(x: Any) -> Any:
    """A tensor as training gives it to the loss: with a gradient."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return x.detach().requires_grad_().clone()  # of which a loss may write to the copy


def takes_targets(blocks: Blocks) -> bool:
    """Whether the sample by which a network was cut holds targets."""
    return not input_names(blocks).isdisjoint(TARGETS)


def input_names(blocks: Blocks) -> set[str]:
    """The names of the inputs of the sample by which a network was cut, if it was a dict."""
    first = blocks.units[0]
    if not isinstance(first, CallUnit) or first.calls is None:
        return set()
    structure = first.calls.code.inputs.structure
    names = tree_unflatten(range(structure.num_leaves), structure)
    return {*names} if isinstance(names, Mapping) else set()


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
    some, labels = rows_of((inputs, targets), rows)
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


def _left_out(labels: Tensor, value: int = LEFT_OUT) -> Tensor:
    """Labels of 5 samples: all of the first are left as they are, none of the third."""
    if labels.dim() == 1:
        return labels.masked_fill(torch.tensor([False, False, True, False, True]), value)
    length = labels.shape[1]
    kept = torch.tensor([length, 1, 0, (length + 1) // 2, max(1, length - 1)])
    beyond = torch.arange(length) >= kept[:, None]
    return labels.masked_fill(beyond.view(*beyond.shape, *[1] * (labels.dim() - 2)), value)


def _shortened(mask: Any) -> Any:
    """A mask (5, L) with unlike numbers of tokens, at least one in each sample."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return mask
    length = mask.shape[1]
    kept = (torch.tensor([2, 4, 6, 5, 3]) * length // 6).clamp_min(1)
    return mask * (torch.arange(length) < kept[:, None])
