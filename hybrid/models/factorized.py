"""A factorization layer put into a network, before one of its units."""

from collections import OrderedDict
from typing import TypeVar

import torch
from torch import nn

from hybrid.models.chain import Chain, mode, units
from hybrid.solvers.layers.projection import Factorization

T = TypeVar("T")
NAME = "factors"


def factorized(model: Chain, wanted: str) -> tuple[Chain, str]:
    """`model` with a `Factorization` before a unit, and the name of the unit that it is.

    `wanted` is "unit:rank", as in "layer3.2:32". All other names stay as they were.
    Raises ValueError for a unit there is not, the first one, or a rank that is no positive integer.
    """
    target, _, rank = wanted.rpartition(":")
    names = [unit.name for unit in units(model)]
    if not rank.isdecimal() or target not in names[1:]:
        raise ValueError(
            f"model.factorize is {wanted!r}; write UNIT:RANK, as in {names[-2]}:16, with one of "
            f"the units {', '.join(names[1:])}"
        )
    if int(rank) < 1:
        raise ValueError(f"model.factorize is {wanted!r}; the rank must be at least 1")
    x = torch.zeros(1, *model.input_shape)
    with mode(model, training=False), torch.no_grad():
        for unit in units(model)[: names.index(target)]:
            for part in unit.parts.values():
                x = part(x)
    layer = Factorization(x.shape[1], int(rank))
    stage, _, child = target.rpartition(".")
    modules, grouping, name = OrderedDict(model.named_children()), model.grouping, NAME
    if stage:
        inner = OrderedDict(modules[stage].named_children())
        modules[stage] = nn.Sequential(_before(child, inner, layer))
        name = f"{stage}.{NAME}"
    else:
        modules = _before(grouping[target][0], modules, layer)
        grouping = _before(target, grouping, (NAME,))
    chain = Chain(modules, grouping, model.input_shape, model.classes)
    return chain.train(model.training), name


def _before(key: str, items: dict[str, T], new: T) -> OrderedDict[str, T]:
    """The items, and a new one called NAME before `key`."""
    made: OrderedDict[str, T] = OrderedDict()
    for each, item in items.items():
        if each == key:
            made[NAME] = new
        made[each] = item
    return made
