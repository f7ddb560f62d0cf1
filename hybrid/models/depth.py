"""Networks of stochastic depth: which of their units may be left out, and how often."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from hybrid.solvers.layers.residual import Skippable

M = TypeVar("M", bound=nn.Module)


def stochastic_depth(model: M, survival: float) -> M:
    """`model`, whose u-th of U residual units survives with probability 1 - u/U (1 - survival).

    So the last one survives with `survival`, in (0, 1]; units that change the shape count, but are
    always there (Huang et al., arXiv 1603.09382, section 3). ValueError for another probability, or
    if no unit of the model can be left out.
    """
    if not 0 < survival <= 1:
        raise ValueError(f"survival is {survival}; it must lie in (0, 1]")
    units = [module for module in model.modules() if isinstance(module, Skippable)]
    if survival < 1 and not any(unit.skippable for unit in units):
        raise ValueError(
            f"survival is {survival}, but {type(model).__name__} has no unit that can be left out: "
            "leave it out, or take a resnet, a preact-resnet or a wide one"
        )
    for number, unit in enumerate(units, 1):
        unit.survival = 1 - number / len(units) * (1 - survival) if unit.skippable else 1.0
    return model
