"""The optimizer of a block's exact steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid.errors import format_error, one_line
from hybrid.settings import torch_classes
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers.blocks.optimizer_state import optimizer_state

Group = dict[str, Any]
"""Parameters that are stepped alike: "params", and settings other than the optimizer's."""
Factory = Callable[[list[Group]], torch.optim.Optimizer]
"""Makes an optimizer of one's own over a block's groups; called once a block, by its thread.

The group of biases and BatchNorm parameters, last, has "weight_decay": 0; the other has none, so
the optimizer's own holds. Its learning rate, the same in all groups, is the peak of the schedule.
"""


def make_optimizer(module: nn.Module, wanted: OptimizerSettings | Factory) -> torch.optim.Optimizer:
    """The optimizer over a block; biases and BatchNorm parameters decay only if asked to.

    ValueError, on one line, for arguments or parameters that its class does not take, and for what
    a factory gives that is no optimizer of the block's parameters.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    # an optimizer needs a parameter, and a block may have none
    parameters = parameters or [nn.Parameter(torch.zeros(0, 0))]
    all_decay = isinstance(wanted, OptimizerSettings) and wanted.decay_all
    plain = [p for p in parameters if p.ndim <= 1 and not all_decay]
    decaying = [p for p in parameters if p.ndim > 1 or all_decay]
    if isinstance(wanted, OptimizerSettings):
        kinds = (decaying, {"weight_decay": wanted.weight_decay}), (plain, {"weight_decay": 0.0})
        return _optimizer_of_settings(
            [{"params": own, **decay} for own, decay in kinds if own], wanted
        )
    groups: list[Group] = [{"params": decaying}] if decaying else []
    groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
    try:
        made = wanted(groups)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"the optimizer's factory fails: {format_error(error)}") from error
    _check_factory_result(made, parameters)
    return made


def peak_rate(optimizer: torch.optim.Optimizer) -> float:
    """Its learning rate, which the schedule starts from; ValueError unless all groups have one."""
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    if any(rate is None or rate != rates[0] for rate in rates):
        raise ValueError(
            f"the groups of {type(optimizer).__name__} have the learning rates "
            f"{', '.join(map(str, rates))}: give all of them one, which the schedule multiplies"
        )
    return float(rates[0])


def keeps_state(wanted: OptimizerSettings | Factory) -> bool:
    """Whether it keeps something of a weight from step to step; a factory's may."""
    return not isinstance(wanted, OptimizerSettings) or count_copies(wanted) > 2


def count_copies(settings: OptimizerSettings) -> int:
    """Numbers in memory for each of a large matrix: itself, its gradient, what is kept of it."""
    weight = nn.Parameter(torch.zeros(64, 64))
    slots = optimizer_state(
        _optimizer_of_settings([{"params": [weight]}], settings), weight
    ).values()
    numbers = sum(slot.numel() for slot in slots if isinstance(slot, torch.Tensor))
    return 2 + round(numbers / weight.numel())


def _optimizer_of_settings(
    groups: list[Group], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    cls: Callable[..., torch.optim.Optimizer] = torch_classes.optimizer_class(settings.name)
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.arguments.items()}
    if settings.name == "sgd":
        nesterov = settings.nesterov and settings.momentum > 0
        arguments |= {"momentum": settings.momentum, "nesterov": nesterov}
    elif settings.name == "adamw":
        arguments = {"betas": (settings.momentum, 0.999), **arguments}
    try:
        made = cls(groups, lr=settings.lr, **arguments)
        if settings.arguments:
            for group in groups:
                optimizer_state(
                    made, group["params"][0]
                )  # what a constructor lets pass may fail in a step
    except Exception as error:
        asked, remedy = f"optimizer.name is {settings.name!r}", "choose another"
        if settings.arguments:
            asked = f"optimizer.arguments is {settings.arguments} of {settings.name}"
            remedy = "leave it out, or change it"
        raise ValueError(f"{asked}, but torch says: {one_line(error)}; {remedy}") from None
    return made


def _check_factory_result(made: object, parameters: list[nn.Parameter]) -> None:
    """ValueError unless a factory has made an optimizer of exactly these."""
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"the optimizer's factory gave a {type(made).__name__}: let it return a "
            "torch.optim.Optimizer over the groups it gets"
        )
    name = type(made).__name__
    if torch_classes.needs_closure(type(made)) or isinstance(made, torch.optim.SparseAdam):
        raise ValueError(
            f"the optimizer's factory gave {name}, but blocks have no closure that evaluates the "
            "loss, and no sparse gradients: take one whose step needs neither"
        )
    found = [p for group in made.param_groups for p in group["params"]]
    if {id(p) for p in found} != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer's factory gave {name} over {len(found)} parameters, of which a block "
            f"has {len(parameters)}: give it all of the groups, and nothing else"
        )
