"""Times passes and messages of a pipeline before training."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybrid.solvers.base import Links
from hybrid.solvers.block import Block
from hybrid.solvers.layers.bundle import Bundle, Crossing, each
from hybrid.solvers.local_work.budget import Measured
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.wire import Wire

STREAM = 16
"""Messages that follow each other where that is timed."""
TURNS = 3
"""Of which the shortest counts: the first meets buffers and kernels that are yet to be made."""


def measure_pipeline(links: Links, block: Block, inputs: Tensor, wire: Wire) -> Measured:
    """Time a micro-batch's passes through each block, and its messages over each cut.

    `inputs` are a micro-batch of the network's, packed as the first block takes them. A rank times
    its passes while the others wait, as ranks may share a core. Weights, statistics and gradients
    stay as they are. All ranks call it, and have the first replica's times.
    """
    seconds, fixed, crossing = _time_block(links, block, inputs)
    turns = range(TURNS)
    packing = min(sum(_time_packing(links, wire, *each) for each in crossing) for _ in turns)
    packed = list[Tensor]()
    wire.send(packed.append, *crossing[-1])
    alone, in_stream = _time_message(links, block, packed), _time_stream(links, block, packed)
    everyone = links.agree((seconds, fixed, packing, alone, in_stream))
    passes, of_one, packings, messages, occupied = map(list, zip(*everyone, strict=True))
    return Measured(passes, of_one, packings, messages[:-1], occupied[1:])


def time_one_rank(links: Links, block: Block, inputs: Tensor, size: int) -> float:
    """Seconds of the passes over `size` samples on one rank that has all blocks, as it would take
    them without micro-batches: estimated from smaller ones, `inputs` as for `measure_pipeline`.
    """
    seconds, fixed, _ = _time_block(links, block, inputs)
    n = len(inputs)
    return sum(a + (each - a) * size / n for each, a in links.agree((seconds, fixed)))


def longest_passes(links: Links, block: Block, inputs: Tensor) -> tuple[float, float]:
    """Seconds of the passes through the slowest block, and how many are there for one sample, too.

    `inputs` as for `measure_pipeline`.
    """
    return max(links.agree(_time_block(links, block, inputs)[:2]))


def _time_block(
    links: Links, block: Block, inputs: Tensor
) -> tuple[float, float, list[tuple[Crossing, Bundle | None]]]:
    """Seconds of a block's passes, how many of them are there for one sample, too, and what
    crosses its cuts."""
    passes, halves = list[float](), list[float]()
    half = max(2, len(inputs) // 2)  # BatchNorm may refuse a single one
    (before, after), as_it_is = block.bundles, Wire()
    for _ in range(TURNS):
        lam: Crossing = inputs
        if not block.first:
            lam = as_it_is.receive(links.from_previous, block.formats[0], before)
        seconds, x = _time_passes(links, block, lam)
        passes.append(seconds)
        halves.append(_time_passes(links, block, each(lambda rows: rows[:half], lam))[0])
        if not block.last:
            as_it_is.send(links.to_next, x, after)
    links.flush()
    fixed = 0.0
    if half < len(inputs):  # of a time a + b samples, a: no more than the smaller pass takes
        a_sample = (min(passes) - min(halves)) / (len(inputs) - half)
        fixed = min(max(0.0, min(passes) - a_sample * len(inputs)), min(halves))
    crossing = [(lam, before)] * (not block.first) + [(x, after)] * (not block.last)
    return min(passes), fixed, crossing


def _time_passes(links: Links, block: Block, lam: Crossing) -> tuple[float, Any]:
    """Seconds of a forward and backward pass, and what goes over the cut."""
    device, module = block.device, block.module
    gradients = [(p, p.grad) for p in module.parameters()]
    lam = each(lambda x: x.to(device).detach().requires_grad_(not block.first), lam)
    with frozen_statistics(module):
        _wait_for(device)
        start = links.now()
        out = block.forward(lam, (2, 0, 0), apart=True)
        ends = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward([x.sum() for x in ends])
        _wait_for(device)
        seconds = links.now() - start
    for p, before in gradients:
        p.grad = before
    return seconds, lam if block.last else each(Tensor.detach, out)


def _time_packing(links: Links, wire: Wire, x: Crossing, bundle: Bundle | None) -> float:
    """Seconds to pack a message of x's size, and to unpack another."""
    x = each(Tensor.detach, x)
    first = x if isinstance(x, Tensor) else x[0]
    _wait_for(first.device)
    start, packed = links.now(), list[Tensor]()
    wire.send(packed.append, x, bundle)
    wire.receive(iter(packed).__next__, first.dtype, bundle)
    _wait_for(first.device)
    return links.now() - start


def _time_message(links: Links, block: Block, tensors: list[Tensor]) -> float:
    """Half the time in which a message goes to the next block and comes back; 0 on the last.

    A block first answers the one before it, in all turns: the first of them waits until it is free.
    """
    times = list[float]()
    for _ in range(0 if block.first else TURNS * len(tensors)):
        links.to_previous(links.from_previous())
    for _ in range(0 if block.last else TURNS):
        _wait_for(block.device)
        start = links.now()
        for tensor in tensors:
            links.to_next(tensor)
        for _ in tensors:
            links.from_next()
        times.append((links.now() - start) / 2)
    links.flush()
    return min(times, default=0.0)


def _time_stream(links: Links, block: Block, tensors: list[Tensor]) -> float:
    """What a message of many occupies of the cut before a block; 0 on the first.

    All cuts carry theirs at once. The first half is not counted: a host or a limiter of its rate
    may take some messages at a higher speed.
    """
    for _ in range(0 if block.last else STREAM):
        for tensor in tensors:
            links.to_next(tensor)
    start = end = 0.0
    for number in range(0 if block.first else STREAM):
        for _ in tensors:
            links.from_previous()
        start, end = (links.now(), end) if number == STREAM // 2 - 1 else (start, links.now())
    links.flush()
    return (end - start) / (STREAM // 2)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
