"""Replacement of a module's parameters by other weights, within passes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.numerics.draws import DispatchMode

Places = dict[str, list[tuple[dict[str, Any], str]]]
"""By parameter name, the modules' parameter dicts and keys that hold it."""


def parameter_places(module: nn.Module) -> Places:
    """Find the places of a module's parameters; this takes longer than a small unit's pass."""
    names = {id(p): name for name, p in module.named_parameters()}
    places: Places = {name: [] for name in names.values()}
    for m in module.modules():
        for field, p in m._parameters.items():
            if p is not None:
                places[names[id(p)]].append((m._parameters, field))
    return places


def trained_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters that are trained."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)


@contextmanager
def replaced_parameters(places: Places, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace a module's parameters by these weights, by name, within the body.

    The body must also contain the backward pass: torch.utils.checkpoint repeats parts of the
    forward pass there.
    """
    before = [(at, field, at[field]) for name in weights for at, field in places[name]]
    try:
        for name, weight in weights.items():
            for at, field in places[name]:
                at[field] = weight
        yield
    finally:
        for at, field, parameter in before:
            at[field] = parameter


class NothingRecomputed(DispatchMode):
    """Raises ValueError if a backward pass repeats a part of the forward pass.

    `otherwise`: the setting by which the weights of the forward pass are kept for that.
    """

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.otherwise = otherwise

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # the backward pass itself runs without gradients
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
            raise ValueError(
                "a module makes its forward pass again in the backward pass (torch.utils."
                "checkpoint), where the weights are newer ones: leave that out, or keep those of "
                f"the forward pass ({self.otherwise})"
            )
        return func(*args, **(kwargs or {}))


def with_parameter_strides(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into the memory layouts of the parameters of the same names.

    With a single channel torch cannot tell two layouts apart, but kernels round differently.
    """
    like = {name: module.get_parameter(name).detach() for name in tensors}
    return {name: torch.empty_like(like[name]).copy_(t) for name, t in tensors.items()}
