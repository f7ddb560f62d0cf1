"""The loss and the metrics of a training, tried on a few samples before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from hybrid.data import Data
from hybrid.data.items import TARGETS
from hybrid.data.mixing import Mix, shapes
from hybrid.data.samplers.base import Learning
from hybrid.networks.blocks import Blocks
from hybrid.networks.call_unit import CallUnit
from hybrid.solvers.acting import unknown
from hybrid.solvers.checks.traces import holders, untraced
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.metrics import (
    LEFT_OUT,
    AllSamples,
    Metric,
    detached,
    logits_of,
    right_answers,
    right_logits,
    try_metrics,
)
from hybrid.solvers.objective import (
    CountOf,
    DividedBy,
    Loss,
    Objective,
    OverClasses,
    loss_of,
    weighted,
)

if TYPE_CHECKING:
    from hybrid.method.options import Options

MODEL = "model"
"""The name of a network's own loss in settings."""
LOSSES: Mapping[str, Loss] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
    MODEL: loss_of,
}
TRIED = 2
"""The number of samples for trials."""


class Objectives(NamedTuple):
    """The objectives of training, test and validation, and the transform of training batches."""

    training: Objective
    test: Objective
    """The objective of the training set if there is no test set."""
    mix: Mix | None
    output: tuple[int, ...] | None
    """The shape of one sample's output; None: several tensors."""
    network: frozenset[int]
    """Ids of the network's modules, which a loss may refer to while threads train them."""
    validation: Objective | None = None
    """None: there is no validation set."""

    @property
    def deciding(self) -> Objective:
        """The objective of the set by which weights are selected."""
        return self.validation or self.test

    def with_validation(
        self, options: Options, blocks: Blocks, train: Data, validation: Data | None
    ) -> Objectives:
        """Add the objective of a validation set, if there is one; ValueError as in `of`."""
        if validation is None:
            return self
        return self._replace(validation=Objectives.of(options, blocks, train, validation).test)

    @classmethod
    def of(cls, options: Options, blocks: Blocks, train: Data, test: Data) -> Objectives:
        """Try loss and metrics on outputs and targets; ValueError with the reason if they fail."""
        loss, smoothed = _losses(options, blocks)
        _check_loss(options.loss, blocks.model)
        mix, (inputs, targets) = None, train.sample(TRIED)
        if options.batch_transform is not None:
            mix, inputs, targets = Mix.of(options.batch_transform, train, TRIED)
        tested_inputs, expected = test.sample(TRIED)
        if not _of_lengths(tested_inputs, inputs, [*train.others, *test.others]):
            raise ValueError(
                f"training inputs have shape {shapes(inputs)}, those that are measured "
                f"{shapes(tested_inputs)}: give both alike"
            )
        out = tree_map(_leaf, blocks.compute_outputs(inputs))
        title = "the loss" if options.loss else f"the loss {options.train.loss!r}"
        title = "the network's own loss" if has_own_loss(options) else title
        measured = test.metrics if options.metrics is None else options.metrics
        for name in measured or {}:
            if not (isinstance(name, str) and name.isprintable() and name):
                raise ValueError(f"metrics has {name!r}, which is no name: give it one, such as f1")
            if name == "loss":
                raise ValueError(
                    "metrics has 'loss', which is the loss itself: give it another name"
                )

        def objective(
            loss: Loss, out: Any, targets: Any, answers: Bundle | None, each: bool = False
        ) -> tuple[Objective, Tensor]:
            metrics = measured
            if metrics is None:
                metrics = _default_metrics(options, out, targets)
            _check_shapes(options, loss, out, targets)
            metrics = try_metrics(metrics, out, targets)
            built = Objective(loss, metrics, answers, title, each, tree_structure(out))
            return built, targets if answers is None else answers.pack(targets)

        with untraced(options.loss):
            packing = train.answers if mix is None else mix.answers
            learns = isinstance(options.sampler, Learning)
            training, packed = objective(smoothed, out, targets, packing, learns)
            training(out, packed)
            tested_out = out
            if shapes(tested_inputs) != shapes(inputs):
                tested_out = tree_map(_leaf, blocks.compute_outputs(tested_inputs))
            tested, packed = objective(loss, tested_out, expected, test.answers)
            if test is not train:
                tested.measured(detached(tested_out), packed)
        classified = loss is nn.functional.cross_entropy
        train.expect_classes(_classes(out, targets) if classified and mix is None else 0)
        test.expect_classes(_classes(out, expected) if classified else 0)
        output = tuple(out.shape[1:]) if isinstance(out, Tensor) else None
        training = replace(training, equal_weights=mix is None and _weigh_equally(smoothed, train))
        tested = replace(tested, equal_weights=_weigh_equally(loss, test))
        _check_at_once(tested, blocks, test)
        network = frozenset(id(module) for module in blocks.model.modules())
        return cls(training, tested, mix, output, network)


def _check_at_once(tested: Objective, blocks: Blocks, test: Data) -> None:
    """Reject a metric of all outputs at once if their lengths differ."""
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


def _of_lengths(tested: Any, inputs: Any, others: Sequence[tuple[Any, Any]]) -> bool:
    """Whether tested inputs have shapes of training inputs, up to lengths known to vary."""
    if tree_structure(tested) != tree_structure(inputs):
        return False
    trained = [tree_leaves(each) for each in (inputs, *(x for x, _ in others))]
    for i, x in enumerate(tree_leaves(tested)):
        if x.dim() != trained[0][i].dim():
            return False
        for n, *lengths in zip(x.shape[1:], *(each[i].shape[1:] for each in trained), strict=True):
            if n != lengths[0] and len({*lengths}) == 1:
                return False
    return True


def has_own_loss(options: Options) -> bool:
    """Whether the network itself computes the training loss."""
    return options.loss is None and options.train.loss == MODEL


def _losses(options: Options, blocks: Blocks) -> tuple[Loss, Loss]:
    """Return the loss with its denominator, and with smoothed labels for training."""
    name, smoothing = options.train.loss, options.train.label_smoothing
    if options.loss is None and name not in LOSSES:
        raise ValueError(unknown(name, LOSSES, "loss"))
    loss = options.loss or LOSSES[name]
    if options.denominator is not None:
        if not callable(options.denominator):
            raise ValueError(
                f"denominator is {repr(options.denominator)[:80]}: give a function of the targets, "
                "the sum of their weights in the loss, or leave it out"
            )
        loss = DividedBy(loss, options.denominator)
    elif has_own_loss(options) and (count := count_of_transformers(blocks.model)) is not None:
        loss = DividedBy(loss, count)
    if not smoothing:
        return loss, loss
    if loss is not nn.functional.cross_entropy:
        what = "loss= is given" if options.loss else f"train.loss is {name!r}"
        raise ValueError(
            f"train.label_smoothing is {smoothing}, but {what}, which has no smoothing: leave "
            "it out"
        )
    return loss, partial(nn.functional.cross_entropy, label_smoothing=smoothing)


def count_of_transformers(model: nn.Module) -> CountOf | None:
    """Return the terms of the mean in a Hugging Face model's loss, by the name of its class.

    None: samples, as for any other network.
    """
    within = getattr(model, "get_base_model", None)  # of peft's, around a model
    model = within() if callable(within) else model
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return None
    name, config = type(model).__name__, getattr(model, "config", None)
    if name.endswith("ForSemanticSegmentation"):
        return CountOf("labels", getattr(config, "semantic_loss_ignore_index", LEFT_OUT))
    if name.endswith(("ForMaskedLM", "ForTokenClassification")):
        return CountOf("labels")
    if name.endswith("ForConditionalGeneration") and getattr(config, "is_encoder_decoder", False):
        return CountOf("labels")
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return CountOf("shifted labels")
    return None


def _check_loss(loss: Any, model: nn.Module) -> None:
    """Reject a loss with trainable weights, which no block would step."""
    parts = holders(loss, {id(m) for m in model.modules()})
    owned = ((n, p) for m in parts if isinstance(m, nn.Module) for n, p in m._parameters.items())
    trained = [name for name, p in owned if p is not None and p.requires_grad]
    if trained:
        raise ValueError(
            f"the loss, {type(loss).__name__}, has {len(trained)} parameters to train, "
            f"{trained[0]!r} first, and only those of the network are trained: make it the last "
            "module of the network, with the targets among its inputs (labels_are_inputs=True), or "
            "freeze them by requires_grad_(False)"
        )


def _check_shapes(options: Options, loss: Loss, out: Any, targets: Any) -> None:
    """Reject targets that torch would broadcast to the output, with a warning at most."""
    name = next((name for name, builtin in LOSSES.items() if builtin is loss), "")
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
    """Count the classes of the output's logits; 0 if the targets are not classes."""
    if not (isinstance(out, Tensor) and isinstance(targets, Tensor)):
        return 0
    classes = targets.dtype is torch.int64 and out.dim() == targets.dim() + 1
    return out.shape[1] if classes and out.shape[:1] + out.shape[2:] == targets.shape else 0


def _default_metrics(options: Options, out: Any, targets: Any) -> Mapping[str, Metric]:
    """Return the accuracy if the output has a logit for each class."""
    if has_own_loss(options):
        return {"accuracy": right_logits} if _classes(logits_of(out), targets) else {}
    return {"accuracy": right_answers} if _classes(out, targets) else {}


def _weigh_equally(loss: Loss, data: Data) -> bool:
    """Whether all targets of the data have the same weight in a weighted loss."""
    if isinstance(loss, DividedBy):
        count = loss.sum_of_weights
        return isinstance(count, CountOf) and not data.leaves_out(count.left_out)
    weighting = weighted(loss)
    if not isinstance(weighting, OverClasses) or weighting.class_weights is not None:
        return False
    return not data.leaves_out(weighting.left_out)


def _leaf(x: Any) -> Any:
    """Make a tensor require a gradient, as in training."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return x.detach().requires_grad_().clone()  # a loss may write to the copy


def takes_targets(blocks: Blocks) -> bool:
    """Whether the sample with which a network was cut holds targets."""
    return not input_names(blocks).isdisjoint(TARGETS)


def input_names(blocks: Blocks) -> set[str]:
    """Return the input names of the sample with which a network was cut, if it was a dict."""
    first = blocks.units[0]
    if not isinstance(first, CallUnit) or first.calls is None:
        return set()
    structure = first.calls.whole.structure
    names = tree_unflatten(range(structure.num_leaves), structure)
    return {*names} if isinstance(names, Mapping) else set()
