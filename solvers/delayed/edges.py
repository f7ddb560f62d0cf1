"""Backward passes in pieces: from the outputs of one unit to its inputs and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from hybrid.solvers.blocks.user_code import failure

Gradients = dict[str, Tensor]

Edges = list[GradientEdge | None]
"""Where the adjoints of a value's tensors go in its graph, in order; None: nowhere."""


def gradient_edges(value: Any) -> Edges:
    """The edges of a tensor, or of the tensors in a tuple, list or dict."""
    return [
        get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None
        for x in tree_leaves(value)
    ]


def vjp(
    out: Edges | list[Tensor],
    p_out: Sequence[Tensor | None],
    inputs: Edges,
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Adjoints of the inputs and gradients of the weights; None where nothing depends on them."""
    pairs = [(o, p) for o, p in zip(out, p_out, strict=True) if o is not None and p is not None]
    wanted = [edge for edge in inputs if edge is not None]
    pairs = [(o, p) for o, p in pairs if not isinstance(o, Tensor) or o.requires_grad]
    if not pairs or not (wanted or weights):
        return [None] * len(inputs), [None] * len(weights)
    outputs, adjoints = zip(*pairs, strict=True)
    try:
        grads = torch.autograd.grad(outputs, [*wanted, *weights], adjoints, allow_unused=True)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(f"the backward pass fails: {failure(error)}") from error
    found = iter(grads)
    return [None if edge is None else next(found) for edge in inputs], [*found]


def separate_memory(
    gradients: dict[str, Tensor | None], p_in: Sequence[Tensor | None]
) -> Gradients:
    """The gradients that there are, each in memory of its own: a step may write to it."""
    seen = {p.untyped_storage().data_ptr() for p in p_in if p is not None}
    found: Gradients = {}
    for name, g in gradients.items():
        if g is not None:
            address = g.untyped_storage().data_ptr()
            found[name] = g.clone() if address in seen else g
            seen.add(address)
    return found


def with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of another tensor of its shape, as autograd leaves a gradient."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def detached_leaf(x: Any) -> Any:
    """A floating-point tensor as a leaf that gets a gradient; anything else as it is."""
    grows = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if grows else x
