"""The gaps of a pipelined pass, and the local work that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

LOCAL_COST = 1.25
"""Time of a local step over that of a forward and backward pass of as many samples.

The record and the coupling move memory. The factor was measured between 1.1 and 1.35 on one core;
it is largest at cuts with large activations.
"""


FillStep = Literal["added", "own"]
"""What becomes of a filled gap's gradient: it is added to the exact one, or has its own step."""


class Gaps(NamedTuple):
    """Samples of local work that a block does in one pass."""

    middle: int = 0
    turn: int = 0


class Cost(NamedTuple):
    """Cost of one block's passes over one sample, in seconds or any other unit of time."""

    forward: float
    backward: float


class PassTimes(NamedTuple):
    """The times of one pass, which begins with the first block's first forward."""

    period: float
    """Time from one pass to the next."""
    middle: list[float]
    """Length of each block's gap between its forwards and its backwards."""
    turn: list[float]
    """Length of each block's gap between its last backward and the next pass."""


def pass_times(
    costs: Sequence[Cost], samples: int, micro_batches: int, transfers: Sequence[float] = ()
) -> PassTimes:
    """When blocks work and when they are idle, in a pass in the order with gaps.

    Forwards run as early as possible and, on all blocks but the last, backwards as late as the
    period allows; the period is that of the pass without local work. `transfers` are the seconds
    that one sample takes over each cut, either way; a cut carries one micro-batch at a time in each
    direction.
    """
    K, m = len(costs), micro_batches
    n = samples / m
    wire = [t * n for t in transfers] or [0.0] * (K - 1)
    f, b = [c.forward * n for c in costs], [c.backward * n for c in costs]

    first_forward, last_forward = [0.0] * K, [0.0] * K
    arrivals = [0.0] * m
    backward_ends = [0.0] * m
    for k in range(K):
        now, leaves = 0.0, 0.0
        for i in range(m):
            start = max(now, arrivals[i])
            first_forward[k] = start if i == 0 else first_forward[k]
            now = start + f[k]
            if k < K - 1:
                leaves = arrivals[i] = max(now, leaves) + wire[k]
            else:
                now += b[k]
                backward_ends[i] = now
        last_forward[k] = now
    turn_starts = [0.0] * (K - 1) + [backward_ends[-1]]
    for k in reversed(range(K - 1)):
        now, leaves = last_forward[k], 0.0
        for i in range(m):
            leaves = max(backward_ends[i], leaves) + wire[k]
            now = max(now, leaves) + b[k]
            backward_ends[i] = now
    period = backward_ends[-1]

    middle = [0.0] * K
    deadlines = [period] * m
    for k in range(K - 1):
        now = turn_starts[k] = min(period, deadlines[-1])
        leaves = period
        for i in reversed(range(m)):
            now = min(now, deadlines[i]) - b[k]
            leaves = deadlines[i] = min(now, leaves) - wire[k]
        middle[k] = max(0.0, now - last_forward[k])
    turn = [max(0.0, period + first_forward[k] - turn_starts[k]) for k in range(K)]
    return PassTimes(period, middle, turn)


def fit_gaps(
    costs: Sequence[Cost],
    samples: int,
    micro_batches: int,
    transfers: Sequence[float] = (),
    grain: int = 8,
) -> list[Gaps]:
    """The local work that fits each block's gaps, in samples, a multiple of `grain`.

    A local step on a sample costs `LOCAL_COST` times its forward and backward pass. A block does
    local work on at most two mini-batches in a pass, since older records are worth less. Every rank
    computes the same plan from the same costs.
    """
    times = pass_times(costs, samples, micro_batches, transfers)
    plan = []
    for cost, *gaps in zip(costs, times.middle, times.turn, strict=True):
        a_sample = max(LOCAL_COST * sum(cost), 1e-30)
        fits = [grain * int(gap / a_sample / grain + 0.05) for gap in gaps]
        middle = min(fits[0], 2 * samples // grain * grain)
        plan.append(Gaps(middle, min(fits[1], 2 * samples // grain * grain - middle)))
    return plan
