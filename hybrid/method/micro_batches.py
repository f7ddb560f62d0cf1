"""Micro-batches on a GPU: no more of them than make passes that are worth their launches."""

from copy import copy
from dataclasses import replace

import torch

from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.local_work.timing import longest_pass

MEASURED_ON = "cuda"
"""Blocks on the CPU have nothing to launch."""
SHORTEST_PASS = 5e-3
"""Seconds of a block's forward and backward pass below which launches, not work, take the time."""


def fit_micro_batches(method: Method, links: RankLinks) -> tuple[Method, str]:
    """Choose m by a measured pass, where it is not set and blocks are on GPUs; say what it costs.

    m is the largest power of two, up to the solver's m, with which the passes of a micro-batch
    through the slowest block take `SHORTEST_PASS` seconds. All ranks call it, and agree.
    """
    solver, K, share = method.solver, method.setup.blocks, method.share
    most = solver.num_micro_batches(share, K)
    if not isinstance(solver, Delayed) or solver.micro_batches or most == 1 or links.clocked:
        return method, ""
    measures = method.device.type == MEASURED_ON and method.may_be_timed
    if not all(links.all_gather_grid(measures)):
        return method, ""
    block, sample = method.block(links), method.problem.sample
    seconds = longest_pass(links, block, sample[torch.arange(share) % len(sample)])
    block.release()
    m = most
    while m > 1 and seconds < m * SHORTEST_PASS:
        m //= 2
    options = copy(method.options)
    options.solver = solver = replace(solver, micro_batches=m)
    late = max(solver.steps_late(k, K, share) for k in range(K))
    said = (
        f"{m} micro-batch{'es' * (m > 1)} of a mini-batch, whose passes through a block take up to "
        f"{1e3 * seconds:.2g} ms: gradients are at most {late:.2g} steps late"
    )
    return replace(method, options=options), said
