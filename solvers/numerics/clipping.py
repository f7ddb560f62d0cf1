"""Gradient clipping. Nothing here reads a tensor's value, so the host never waits for a device."""

from typing import Protocol

import torch
from torch import Tensor


class NeighborLinks(Protocol):
    """The links between the blocks of a network, as far as clipping uses them."""

    rank: int
    size: int

    def to_next(self, tensor: Tensor) -> None: ...
    def from_previous(self) -> Tensor: ...
    def to_previous(self, tensor: Tensor) -> None: ...
    def from_next(self) -> Tensor: ...


def clip_gradients(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients to `max_norm` if their norm, a tensor (), is above it.

    The bits equal those of `torch.nn.utils.clip_grad_norm_`.
    """
    if gradients:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def clip_each(sets: list[list[Tensor]], max_norm: float, device: torch.device) -> None:
    """Clip the gradients of each set by the norm of the set."""
    for gradients in sets:
        clip_gradients(gradients, max_norm, total_norm(gradient_norms(gradients, device), None))


def gradient_norms(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Compute the Euclidean norm of each of n gradients, (n,)."""
    if not gradients:
        return torch.zeros(0, device=device)
    return torch.stack(list(torch._foreach_norm(gradients)))


def total_norm(norms: Tensor, chain: NeighborLinks | None) -> Tensor:
    """Compute the norm of all gradients from their norms, of a block or of a chain of blocks.

        block 0   -- norms of 0 -->   block 1   -- norms of 0, 1 -->   block 2
                  <---- total ----              <------ total -----

    The total is over the norms in the order of the blocks, so it has the same bits as in the
    undivided network.
    """
    if chain is not None and chain.rank > 0:
        norms = torch.cat([chain.from_previous(), norms])
    if chain is not None and chain.rank < chain.size - 1:
        chain.to_next(norms)
        total = chain.from_next()
    else:
        total = torch.linalg.vector_norm(norms)
    if chain is not None and chain.rank > 0:
        chain.to_previous(total)
    return total
