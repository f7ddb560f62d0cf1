"""Gradients of bounded norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AllGather = Callable[[list[float]], list[list[float]]]
"""Everyone's list, in rank order."""


def clip_gradients(gradients: list[Tensor], max_norm: float, norms: list[float]) -> None:
    """Scale gradients so that the norm of `norms` (everyone's, in order) is at most `max_norm`.

    The arithmetic of `torch.nn.utils.clip_grad_norm_`, bit for bit, over any number of ranks.
    """
    if not gradients:
        return
    total = torch.linalg.vector_norm(torch.tensor(norms, dtype=gradients[0].dtype))
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def gradient_norms(gradients: list[Tensor]) -> list[float]:
    """Each gradient's Euclidean norm."""
    if not gradients:
        return []
    return [float(n) for n in torch.stack(list(torch._foreach_norm(gradients))).tolist()]
