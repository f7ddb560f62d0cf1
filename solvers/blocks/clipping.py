"""Gradients of bounded norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AllGather = Callable[[list[float]], list[list[float]]]
"""Gathers the lists of all ranks, in order."""


def clip_gradients(gradients: list[Tensor], max_norm: float, norms: Tensor) -> None:
    """Scale gradients so that the norm of `norms` (of all ranks, in order) is at most `max_norm`.

    This is the arithmetic of `torch.nn.utils.clip_grad_norm_`, bit for bit, over any number of
    ranks.
    """
    if not gradients:
        return
    total = torch.linalg.vector_norm(norms.to(gradients[0].dtype))
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def gradient_norms(gradients: list[Tensor]) -> Tensor:
    """The Euclidean norm of each of n gradients, (n,), on their device."""
    return torch.stack(list(torch._foreach_norm(gradients))) if gradients else torch.zeros(0)
