"""Work that all replicas would do alike, divided among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid.solvers.sync.base import Peers


class Sharing:
    """Each of R replicas computes some of n tensors, and gives them to the others.

    The costliest go first, each to the replica that has the least to do, so that all replicas know
    without a message who computes what. The tensors are the same whoever computes them, and so are
    the bits. A replica sends what it has computed once to each other, 1/R of all numbers.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __call__(
        self, costs: Sequence[float], compute: Callable[[int], Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """All of `compute(i)`, which have the shapes and number formats of `like[i]`."""
        owners = self.owners(costs)
        parts = [[i for i, r in enumerate(owners) if r == s] for s in range(self.peers.replicas)]
        mine, dtype = self.peers.replica, torch.float32
        for each in like:
            dtype = torch.promote_types(dtype, each.dtype)
        own = [compute(i).reshape(-1).to(dtype) for i in parts[mine]]
        device = like[0].device if like else None
        sizes = [sum(like[i].numel() for i in part) for part in parts]
        messages = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        messages[mine] = torch.cat([messages[mine][:0], *own])
        arrived = self.peers.exchange([messages[mine]] * len(parts), messages)()
        found: dict[int, Tensor] = {}
        for part, message in zip(parts, arrived, strict=True):
            pieces = message.split([like[i].numel() for i in part])
            for i, piece in zip(part, pieces, strict=True):
                found[i] = piece.view(like[i].shape).to(like[i].dtype)
        return [found[i] for i in range(len(like))]

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The replica that computes each."""
        load = [0.0] * self.peers.replicas
        owners = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = min(range(len(load)), key=load.__getitem__)
            load[owners[i]] += costs[i]
        return owners
