"""What makes the ranks of a delayed pipeline wait, timed before training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybrid.links import RankLinks
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.waits import Measured
from hybrid.solvers.exact.pipeline import Wire
from hybrid.solvers.numerics.buffers import frozen_statistics

ROUNDS = 3
"""Of which the shortest counts: the first meets buffers and kernels that are yet to be made."""


def measure_waits(links: RankLinks, block: Block, inputs: Tensor, wire: Wire) -> Measured:
    """Time a micro-batch's passes through each block, and its messages over each cut.

    `inputs` are a micro-batch of the network's, packed as the first block takes them. A rank times
    its passes while the others wait, as ranks may share a core. Weights, statistics and gradients
    stay as they are. All ranks call it, and have the first replica's times.
    """
    passes = list[float]()
    message, empty = list[float](), list[float]()
    for _ in range(ROUNDS):
        lam = inputs if block.first else links.from_previous()
        seconds, x = _time_passes(links, block, lam)
        passes.append(seconds)
        if not block.last:
            links.to_next(x)
    links.flush()
    for tensor, times in ((x, message), (x.flatten()[:1].contiguous(), empty)):
        echo = wire if tensor is x else Wire()
        for _ in range(ROUNDS):
            if not block.first:
                like = echo.receive(links.from_previous, block.dtype)
                echo.send(links.to_previous, like)
            if not block.last:
                start = links.now()
                echo.send(links.to_next, tensor)
                echo.receive(links.from_next, block.dtype)
                times.append((links.now() - start) / 2)
    links.flush()
    own = min(passes), min(message, default=0.0), min(empty, default=0.0)
    everyone = links.agree(own)
    return Measured(
        [each for each, _, _ in everyone],
        [each for _, each, _ in everyone[:-1]],
        min(each for _, _, each in everyone[:-1]),
    )


def _time_passes(links: RankLinks, block: Block, lam: Tensor) -> tuple[float, Tensor]:
    """Seconds of a forward and backward pass, and what goes over the cut."""
    device, module = block.device, block.module
    gradients = [(p, p.grad) for p in module.parameters()]
    lam = lam.to(device).detach()
    if not block.first and lam.is_floating_point():
        lam.requires_grad_()
    with frozen_statistics(module):
        _wait_for(device)
        start = links.now()
        out = block.forward(lam, (2, 0, 0))
        ends = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward([x.sum() for x in ends])
        _wait_for(device)
        seconds = links.now() - start
    for p, before in gradients:
        p.grad = before
    return seconds, out.detach() if isinstance(out, Tensor) else torch.empty(0)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
