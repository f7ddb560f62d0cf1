"""The optimizer of a block, from settings or a user's factory, and its frozen parameters."""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hybrid.errors import format_error, one_line
from hybrid.method.user_optimizer import UserOptimizer, check_class, check_rates
from hybrid.networks.blocks import Blocks
from hybrid.settings import torch_classes
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers.acting import unknown
from hybrid.solvers.named import is_reference
from hybrid.solvers.numerics.optimizer_state import clone_optimizer, optimizer_state, to_tensors

M = TypeVar("M", bound=nn.Module)
Group = dict[str, Any]
"""A parameter group: "params", and settings that differ from the optimizer's."""
Factory = Callable[..., torch.optim.Optimizer]
"""A user's function that makes a block's optimizer; called once per block, by its thread.

If blocks share a weight, it is called once more for each of them before, to check that all copies
would be stepped by the same rule.

It gets groups of the block's parameters. The last group, of biases and BatchNorm parameters, has
"weight_decay": 0; the other has none, so the optimizer's default applies. The learning rate of the
first group is the peak of the schedule, and other groups keep their ratio to it.

A function with a parameter called `named_parameters` gets pairs (name in the whole model,
parameter) instead; of several names, the first. The peak of the schedule is then the lr= of the
optimizer's constructor, which must be the same on each block; every group keeps its ratio to it.
"""

RAMP = 200.0
"""psi of NAdam times the steps of a training; torch's 0.004 is meant for 50,000 steps.

The momentum then completes half of its rise after 8 % of the training.
"""


def placed(module: M, device: torch.device) -> M:
    """Move a module to a device, with channels_last weights of image convolutions."""
    if any(x.device != device for x in (*module.parameters(), *module.buffers())):
        module.to(device)  # which swaps tensors of classes of their own, where it can
    for parameter in module.parameters():
        if parameter.dim() == 4:
            # not contiguous(): for one channel it keeps ambiguous strides
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return module


def make_optimizer(
    module: nn.Module,
    wanted: OptimizerSettings | Factory | UserOptimizer,
    vectors: Iterable[nn.Parameter] = (),
    total_steps: int = 0,
    named: Mapping[str, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer over a block; biases and BatchNorm parameters decay only on request.

    `vectors` are matrices that a rule for matrices leaves out, see `find_vectors`. `total_steps` is
    the length of the training, 0 if unknown. `named` has the block's parameters by their names in
    the whole model.

    ValueError for arguments or parameters that its class does not take, and for a factory that does
    not return an optimizer of the block's parameters.
    """
    trained = {name: p for name, p in (named or {}).items() if p.requires_grad}
    if isinstance(wanted, UserOptimizer):
        return wanted.part(trained)
    parameters = [p for p in module.parameters() if p.requires_grad]
    # an optimizer needs a parameter, and a block may have none
    parameters = parameters or [nn.Parameter(torch.zeros(0, 0))]
    if isinstance(wanted, OptimizerSettings):
        groups = _groups_of_settings(parameters, wanted, {*map(id, vectors)})
        return _keep_ratios(_optimizer_of_settings(groups, wanted, total_steps), wanted.lr)
    by_name = {id(p): name for name, p in trained.items()}
    return _optimizer_of_factory([(by_name.get(id(p), "weight"), p) for p in parameters], wanted)


def _groups_of_settings(
    parameters: list[nn.Parameter], settings: OptimizerSettings, vectors: Container[int]
) -> list[Group]:
    """Group matrices with their own rule, parameters that decay, and others; no empty groups."""
    matrices: list[nn.Parameter] = []
    vector_rule: Group = {}
    if settings.name in torch_classes.BY_SHAPE:
        matrices = [p for p in parameters if is_matrix(p) and id(p) not in vectors]
        if any(p.is_complex() for p in parameters):
            raise ValueError(
                f"optimizer.name is {settings.name!r}, which has no rule for complex weights: "
                "choose sgd or adamw"
            )
        vector_rule = {"rule": settings.vectors, "lr": settings.vectors_lr or settings.lr}
    by_shape = {id(p) for p in matrices}
    others = [p for p in parameters if id(p) not in by_shape]
    decaying = [p for p in others if p.ndim > 1 or settings.decay_all]
    plain = [p for p in others if p.ndim <= 1 and not settings.decay_all]
    groups: list[Group] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": decaying, "weight_decay": settings.weight_decay, **vector_rule},
        {"params": plain, "weight_decay": 0.0, **vector_rule},
    ]
    return [group for group in groups if group["params"]]


def _optimizer_of_factory(
    named: list[tuple[str, nn.Parameter]], factory: Factory
) -> torch.optim.Optimizer:
    parameters = [p for _, p in named]
    groups: list[Group] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    by_name = torch_classes.has_parameter(factory, "named_parameters")
    try:
        if by_name:
            optimizer = factory(named_parameters=named)
        else:
            optimizer = factory([group for group in groups if group["params"]])
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"the optimizer's factory fails: {format_error(error)}") from error
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the optimizer's factory gave a {name}: let it return a torch.optim.Optimizer over "
            "the groups it gets"
        )
    check_class(optimizer, f"the optimizer's factory gave {name}")
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if {id(p) for p in stepped} != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer's factory gave {name} over {len(stepped)} parameters, of which a block "
            f"has {len(parameters)}: give it all of the groups, and nothing else"
        )
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    check_rates(name, rates)
    common = optimizer.defaults.get("lr") if by_name else None
    return _keep_ratios(optimizer, float(common or rates[0]))


def _keep_ratios(optimizer: torch.optim.Optimizer, peak: float) -> torch.optim.Optimizer:
    """Set "lr_index" and "lr_ratio" of every group: its place, and its rate over the peak."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr_index"] = index
        group["lr_ratio"] = float(group["lr"]) / peak
    return optimizer


def peak_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the schedule's peak rate of an optimizer from `make_optimizer`."""
    rates = {float(g["lr_ratio"]): float(g["lr"]) for g in optimizer.param_groups if g["lr"]}
    ratio = 1.0 if 1.0 in rates else next(iter(rates))
    return rates[ratio] / ratio


def find_vectors(model: nn.Module, order: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Find the weights of embeddings and of the output layer (the last matrix), by all names.

    `order` has the parameter names in the order of the forward pass; empty: in registration order.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, embeddings)}
    last = [named[name] for name in order or named if is_matrix(named[name])][-1:]
    return {n: p for n, p in named.items() if id(p) in looked_up | {*map(id, last)}}


def is_matrix(p: torch.Tensor) -> bool:
    """Whether a parameter maps several values to several, unlike a vector of any dimensions."""
    return p.ndim > 1 and len(p) > 1 and p.numel() > len(p)


def count_moments(wanted: OptimizerSettings | Factory | torch.optim.Optimizer) -> float:
    """The bytes of the optimizer's state of a large matrix, over those of its weights."""
    weight = nn.Parameter(torch.zeros(256, 256))
    if isinstance(wanted, torch.optim.Optimizer):
        optimizer = clone_optimizer(wanted, [{**wanted.param_groups[0], "params": [weight]}])
    elif isinstance(wanted, OptimizerSettings):
        optimizer = _optimizer_of_settings([{"params": [weight]}], wanted)
    else:
        optimizer = _optimizer_of_factory([("weight", weight)], wanted)
    stored = sum(x.nbytes for x in to_tensors(optimizer_state(optimizer, weight)).values())
    return round(stored / weight.nbytes, 2)


def _optimizer_of_settings(
    groups: list[Group], settings: OptimizerSettings, total_steps: int = 0
) -> torch.optim.Optimizer:
    cls: Callable[..., torch.optim.Optimizer] = torch_classes.optimizer_class(settings.name)
    own = is_reference(settings.name)
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.arguments.items()}
    if settings.name in ("sgd", "muon"):
        nesterov = settings.nesterov and settings.momentum > 0
        arguments |= {"momentum": settings.momentum, "nesterov": nesterov}
    elif settings.name in torch_classes.OPTIMIZERS:
        beta = inspect.signature(cls).parameters["betas"].default[1]
        arguments = {"betas": (settings.momentum, beta), **arguments}
        if settings.name == "nadamw":
            ramp = {"momentum_decay": RAMP / total_steps} if total_steps else {}
            arguments = {"decoupled_weight_decay": True, **ramp, **arguments}
    try:
        optimizer = cls(groups, lr=settings.lr, **arguments)
        asked = {*arguments} | ({"weight_decay"} if settings.weight_decay else set())
        kept = {*vars(optimizer)} - {"weight_decay"} | {*optimizer.defaults}
        if own and asked - kept:  # another one could not be made like it
            raise ValueError(f"it keeps no {min(asked - kept)} among its defaults: leave that out")
        if settings.arguments or own:
            for group in groups:  # what a constructor lets pass may fail in a step
                optimizer_state(optimizer, group["params"][0])
    except Exception as error:
        setting, remedy = f"optimizer.name is {settings.name!r}", "choose another"
        if settings.arguments:
            setting = f"optimizer.arguments is {settings.arguments} of {settings.name}"
            remedy = "leave it out, or change it"
        raise ValueError(f"{setting}, but its class says: {one_line(error)}; {remedy}") from None
    return optimizer


def frozen_epochs(wanted: Mapping[str, int], blocks: Blocks, epochs: int) -> dict[str, int]:
    """Return, by full parameter name, the epochs for which it is frozen; 0: all of `epochs`.

    `wanted` has names of parameters or modules; the longest that matches a parameter applies.
    ValueError for an unknown name, and if no parameter would be trained in the first epoch.
    """
    named = {n: p for unit in blocks.units for n, p in unit.parameters().items()}
    trained = [name for name, p in named.items() if p.requires_grad]
    for prefix in wanted:
        if not any(_within(name, prefix) for name in named):
            parts = [name.split(".") for name in named]
            prefixes = {".".join(part[: i + 1]) for part in parts for i in range(len(part))}
            raise ValueError(f"train.frozen: {unknown(prefix, sorted(prefixes), 'parameter')}")
        if not any(_within(name, prefix) for name in trained):
            raise ValueError(
                f"train.frozen.{prefix} is {wanted[prefix]}, but none of its parameters requires a "
                "gradient, so it would change nothing: leave it out"
            )
    epochs_of: dict[str, int] = {}
    for name in trained if wanted else ():
        if fitting := [prefix for prefix in wanted if _within(name, prefix)]:
            count = wanted[max(fitting, key=len)]
            epochs_of[name] = count if count < epochs else 0
    # tied weights have several names
    several = [[n for n in trained if named[n] is named[name]] for name in [*epochs_of]]
    several += [names for ties in blocks.ties.values() for names in ties]
    for names in several:
        counts = [epochs_of[name] for name in names if name in epochs_of]
        epochs_of |= dict.fromkeys(names, counts[0]) if counts else {}
    if epochs_of and len(epochs_of) == len(trained):
        raise ValueError(
            f"train.frozen is {dict(wanted)}, which leaves no parameter to train in the first "
            "epoch: leave some out of it"
        )
    return epochs_of


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
