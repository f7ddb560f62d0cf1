"""Units that take as long as the real ones and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid.links.virtual import VirtualLinks
from hybrid.models import Chain, units
from solvers.base import Shape
from solvers.passes.pipeline import Cost


class StandIn(nn.Module):
    """A unit's weights and its output's shape; a pass over n samples takes what a table says.

    Everything around the passes is real: messages, number formats, stores, steps of the weights.
    So a method's program runs on stand-ins as it does on the network, and virtual links tell how
    long that would take, without the passes, which are most of the work.
    """

    def __init__(
        self, parts: Sequence[nn.Module], shape: Shape, sizes: Sequence[int], costs: Sequence[Cost]
    ) -> None:
        super().__init__()
        own = {id(p): p for part in parts for p in part.parameters()}
        self.weights = nn.ParameterList(own.values())
        self.shape, self.sizes = shape, np.array(sizes)
        self.seconds = [np.array(each) for each in zip(*costs, strict=True)]
        """Forward and backward, of a sample, at each of the sizes."""
        self.links: VirtualLinks | None = None
        """Whose clock counts; None: nobody's."""
        self._blanks: dict[Shape, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pass.apply(self, x, *self.weights)  # type: ignore[no-untyped-call]
        return out

    def spend(self, way: int, samples: int) -> None:
        """Let the time of a forward (0) or backward (1) pass go by."""
        if self.links is not None:
            self.links.work(samples * float(np.interp(samples, self.sizes, self.seconds[way])))

    def blank(self, shape: Shape) -> Tensor:
        """Zeros, which nobody may write to."""
        if shape not in self._blanks:
            zeros = torch.zeros(shape)
            channels_last = zeros.dim() == 4
            self._blanks[shape] = (
                zeros.to(memory_format=torch.channels_last) if channels_last else zeros
            )
        return self._blanks[shape].detach()


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: StandIn, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.unit, ctx.shape, ctx.like = unit, tuple(x.shape), weights
        unit.spend(0, len(x))
        return unit.blank((len(x), *unit.shape))

    @staticmethod
    def backward(ctx: Any, *p_out: Tensor) -> Any:
        ctx.unit.spend(1, len(p_out[0]))
        _, wanted, *trained = ctx.needs_input_grad
        pairs = zip(ctx.like, trained, strict=True)
        gradients = [torch.zeros_like(w) if asked else None for w, asked in pairs]
        return None, ctx.unit.blank(ctx.shape) if wanted else None, *gradients


def stand_in(model: Chain, table: Mapping[int, Sequence[Cost]]) -> Chain:
    """The model with a stand-in for every unit; `table`: samples a pass -> each unit's cost."""
    made, sizes = deepcopy(model), sorted(table)
    x = torch.zeros(1, *model.input_shape)
    was_training = model.training
    model.eval()
    for i, (real, unit) in enumerate(zip(units(model), units(made), strict=True)):
        with torch.no_grad():
            for part in real.parts.values():
                x = part(x)
        first, *rest = unit.parts
        costs = [table[size][i] for size in sizes]
        _put(made, first, StandIn(list(unit.parts.values()), tuple(x.shape[1:]), sizes, costs))
        for path in rest:
            _put(made, path, nn.Identity())
    model.train(was_training)
    return made


def clocked(module: nn.Module, links: VirtualLinks) -> None:
    """Let the stand-ins of a rank's block count on its clock."""
    for part in module.modules():
        if isinstance(part, StandIn):
            part.links = links


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
