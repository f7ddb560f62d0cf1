"""Micro-batches on a GPU: no more of them than make passes that are worth their launches."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from math import ceil

import torch

from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.local_work.timing import longest_passes

MEASURED_ON = "cuda"
"""Blocks on the CPU have nothing to launch."""
SHORTEST_PASS = 5e-3
"""Seconds of a block's forward and backward pass below which launches, not work, take the time."""


def fit_micro_batches(
    method: Method, links: RankLinks, stored: Callable[[], int]
) -> tuple[Method, str]:
    """Choose m by a measured pass, where it is not set and blocks are on GPUs; say what it costs.

    m is the largest power of two, up to the solver's m, with which the passes of a micro-batch
    through the slowest block take `SHORTEST_PASS` seconds. A resumed run has the micro-batches of
    `stored` samples that its checkpoint has, if any. All ranks call it, and agree.
    """
    solver, K, share = method.solver, method.setup.blocks, method.share
    most = solver.num_micro_batches(share, K)
    if not isinstance(solver, Delayed) or solver.micro_batches or most == 1 or links.clocked:
        return method, ""
    measures = method.device.type == MEASURED_ON and method.may_be_timed
    if method.options.train.deterministic or not all(links.all_gather_grid(measures)):
        return method, ""
    with links.agreement():
        part = stored()
    m, said, options = 1, "", copy(method.options)
    if (part := links.first_of(part or None) or 0) > 0:
        while ceil(share / m) > part:
            m *= 2
    else:
        with links.agreement():
            block = method.block(links)
        size, sample = method.micro_batch, method.problem.sample
        try:
            seconds, fixed = longest_passes(links, block, sample[torch.arange(size) % len(sample)])
        finally:
            block.release()
        while 2 * m <= most and fixed + (seconds - fixed) * most / (2 * m) >= SHORTEST_PASS:
            m *= 2
        late = max(replace(solver, micro_batches=m).steps_late(k, K, share) for k in range(K))
        said = (
            f"{m} micro-batch{'es' * (m > 1)} of a mini-batch, since passes of one in {most} "
            f"through a block take up to {1e3 * seconds:.2g} ms: gradients are at most {late:.2g} "
            "steps late"
        )
    options.solver = replace(solver, micro_batches=m)
    return replace(method, options=options), said
