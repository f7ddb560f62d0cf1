"""Estimates of the memory that a rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor, nn

from hybrid.bench.recipes import Recipe
from hybrid.method.method import Method
from hybrid.solvers.layers.depth import nothing_left_out


class Memory:
    """Estimates bytes from passes over two samples, a run of units measured once."""

    def __init__(self, copies: int) -> None:
        self._copies = copies
        """Of the weights: themselves, their gradients, what the optimizer keeps."""
        self._saved: dict[tuple[object, ...], float] = {}

    def needed(self, recipe: Recipe, method: Method, inputs: Sequence[Tensor]) -> list[int]:
        """Of each block of the replica whose method it is.

        `inputs`, of some samples, go into the blocks. Counted are weights, their optimizer, what
        keeps replicas together, graphs alive at once, auxiliary variables.
        """
        blocks, replicas, gaps = method.problem.blocks, method.setup.replicas, method.gaps
        size, exact, K = method.setup.batch_size, recipe.serial, len(blocks)
        copies = recipe.sync.copies(replicas) if replicas > 1 else 0.0
        m = exact.micro_batches
        share = ceil(size / m)
        needed = []
        for k, given in enumerate(inputs):
            lam = given.shape[1:]
            module = blocks.module(k)
            weights = sum(
                p.nbytes * (self._copies if p.requires_grad else 1) for p in module.parameters()
            )
            summed = sum(p.nbytes for p in module.parameters() if p.requires_grad)
            arriving = given.detach()[:1].expand(size, *lam).requires_grad_(k > 0)
            a_sample = self.graph(module, arriving) / size
            graph = round(share * a_sample)
            flying = m if gaps and k < K - 1 else min(m, K - k)
            if exact.recompute:
                a_value = arriving.element_size()
                graph, flying = graph + (flying - 1) * prod(lam) * a_value * share, 1
            live = flying * graph
            if recipe.delayed:
                live = recipe.solver.held_bytes(module, arriving, k, K, self.graph)
            if recipe.windowed:
                live = max(live, round(size * a_sample))
            if gaps:
                live += round(min(max(gaps[k]), size) * a_sample)
            needed.append(weights + round(copies * summed) + live + method.memory(k))
        return needed

    def graph(self, module: nn.Module, x: Tensor) -> int:
        """What autograd keeps of a pass over x for the backward pass, parameters left out."""
        parameters = tuple(id(p) for p in module.parameters())
        kinds = tuple(type(m) for m in module.modules())
        key = (kinds, parameters, tuple(x.shape[1:]), x.requires_grad)
        if key not in self._saved:
            # of real samples: a module may not take others
            two = x.detach()[:1].repeat_interleave(2, 0).contiguous(memory_format=_layout(x))
            self._saved[key] = saved_bytes(module, two.requires_grad_(x.requires_grad)) / 2
        return round(len(x) * self._saved[key])


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a pass over x for the backward pass, parameters left out."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaf = x.detach().requires_grad_(x.requires_grad)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), hooks, nothing_left_out():
        module(leaf)
    return sum(kept.values())


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format
