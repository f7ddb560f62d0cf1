"""A factorisation layer put into a network, before one of its units."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from hybrid.models.chain import Chain, units
from solvers.layers.factorisation import Factorisation

NAME = "factors"


def factorised(model: Chain, wanted: str) -> tuple[Chain, str]:
    """`model` with a `Factorisation` before a unit, and the name of the unit that it is.

    `wanted` is "unit:rank", as in "layer3.2:32". All other names stay as they were.
    Raises ValueError for a unit there is not, the first one, or a rank that is no positive integer.
    """
    target, _, rank = wanted.rpartition(":")
    names = [unit.name for unit in units(model)]
    if not rank.isdecimal() or target not in names[1:]:
        raise ValueError(
            f"model.factorise is {wanted!r}; write UNIT:RANK, as in {names[-2]}:16, with one of "
            f"the units {', '.join(names[1:])}"
        )
    if int(rank) < 1:
        raise ValueError(f"model.factorise is {wanted!r}; the rank must be at least 1")
    layer = Factorisation(_channels(model, target), int(rank))
    stage, _, child = target.rpartition(".")
    if stage:
        made = OrderedDict(model._modules)
        inner = model.get_submodule(stage)
        made[stage] = nn.Sequential(_before(OrderedDict(inner._modules), child, layer))
        grouping, name = dict(model.grouping), f"{stage}.{NAME}"
    else:
        first = model.grouping[target][0]
        made, name = _before(OrderedDict(model._modules), first, layer), NAME
        pairs = list(model.grouping.items())
        at = [unit for unit, _ in pairs].index(target)
        grouping = dict([*pairs[:at], (NAME, (NAME,)), *pairs[at:]])
    modules: OrderedDict[str, nn.Module] = OrderedDict(
        (key, module) for key, module in made.items() if module is not None
    )
    chain = Chain(modules, grouping, model.input_shape, model.classes)
    return chain.train(model.training), name


def _before(
    modules: OrderedDict[str, nn.Module | None], child: str, layer: nn.Module
) -> OrderedDict[str, nn.Module]:
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for key, module in modules.items():
        if key == child:
            made[NAME] = layer
        if module is not None:
            made[key] = module
    return made


def _channels(model: Chain, target: str) -> int:
    """Channels of what unit `target` takes."""
    was = model.training
    model.eval()
    x = torch.zeros(1, *model.input_shape)
    with torch.no_grad():
        for unit in units(model):
            if unit.name == target:
                break
            for part in unit.parts.values():
                x = part(x)
    model.train(was)
    return int(x.shape[1])
