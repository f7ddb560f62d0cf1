"""The local budget: where ranks of a pipeline that is never flushed wait, and what fits there."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

LOCAL_COST = 1.25
"""Time of a local step over that of a forward and backward pass of as many samples.

The record and the coupling move memory. The factor was measured between 1.1 and 1.35 on one core;
it is largest at cuts with large activations.
"""
MARGIN = 0.85
"""Share of a wait that local work may take: on a real machine passes and messages vary."""
SHORT = 0.1
"""Share of a tick below which messages count as none: they hide behind work."""


class Cost(NamedTuple):
    """Cost of one block's passes over one sample, in seconds or any other unit of time."""

    forward: float
    backward: float


class LocalBudget(NamedTuple):
    """Samples of local work that a block does in a tick, where it would wait for a neighbor."""

    adjoint: int = 0
    """Between its forward and its backward pass, for the next block."""
    activation: int = 0
    """After its backward pass, for the previous block."""


@dataclass(frozen=True)
class Pipeline:
    r"""What the ticks of a pipeline that is never flushed depend on, in one unit of time.

    f_k, b_k: a micro-batch's forward and backward pass on block k; t_k: its message over the cut
    behind block k, either way; d_k: the block's delay in ticks. A micro-batch that goes up from
    block k comes back over block j > k after d_k - d_j + 1 ticks at the latest, or block k cannot
    go on. So no tick is shorter than

        T = max over k <= j of (sum_{i=k..j} (f_i + b_i) + 2 sum_{i=k..j-1} t_i) / (d_k - d_j + 1)

    nor than what a message occupies of a cut, which carries one at a time in each direction. A
    filled pipeline takes T a tick: with F_k and B_k the beginnings of a block's passes in a tick,

        F_0 = 0,  F_{k+1} = F_k + f_k + t_k,
        B_k = max(F_k + f_k,  B_{k+1} + b_{k+1} + t_k - (d_k - d_{k+1}) T)

    is a timetable that every tick repeats T later. The rank waits from F_k + f_k to B_k for an
    adjoint, and from B_k + b_k to F_k + T for an activation, T - f_k - b_k in all.
    """

    costs: Sequence[Cost]
    """Of each block, for one sample."""
    delays: Sequence[int]
    samples: int
    """Of a micro-batch."""
    messages: Sequence[float] = ()
    """t_k of each cut, from a message's leaving to its arrival; empty: none takes any time."""
    occupied: Sequence[float] = ()
    """What a message occupies of each cut, where many follow each other: t_k less a latency."""
    packing: Sequence[float] = ()
    """What a micro-batch's messages cost each block besides, half of it with either pass."""
    replays: bool = False
    """Whether all blocks but the last go forward once more before they go backward."""
    fixed: Sequence[float] = ()
    """Time of a forward and backward pass on each block that does not depend on its samples."""

    def passes(self) -> tuple[list[float], list[float]]:
        """f_k and b_k."""
        last, more = len(self.costs) - 1, self.packing or [0.0] * len(self.costs)
        forwards, backwards = list[float](), list[float]()
        for k, (cost, packing) in enumerate(zip(self.costs, more, strict=True)):
            forward = self.samples * cost.forward
            backward = self.samples * cost.backward + forward * (self.replays and k < last)
            forwards.append(forward + packing / 2)
            backwards.append(backward + packing / 2)
        return forwards, backwards

    @property
    def t(self) -> list[float]:
        """t_k."""
        return [*self.messages] or [0.0] * (len(self.costs) - 1)

    def tick(self) -> float:
        """T."""
        d = self.delays
        work = [0.0, *accumulate(map(sum, zip(*self.passes(), strict=True)))]
        wire = [0.0, *accumulate(self.t)]
        blocks = range(len(self.costs))
        trips = [
            (work[j + 1] - work[k] + 2 * (wire[j] - wire[k])) / (d[k] - d[j] + 1)
            for k in blocks
            for j in blocks[k:]
        ]
        return max([*trips, *self.occupied])

    def idle(self) -> list[tuple[float, float]]:
        """How long each block waits in a tick, for an adjoint and for an activation."""
        T, t, d = self.tick(), self.t, self.delays
        f, b = self.passes()
        F = [0.0, *accumulate(f[k] + t[k] for k in range(len(t)))]
        B = [start + forward for start, forward in zip(F, f, strict=True)]
        for k in reversed(range(len(t))):
            B[k] = max(B[k], B[k + 1] + b[k + 1] + t[k] - (d[k] - d[k + 1]) * T)
        return [
            (max(0.0, B[k] - F[k] - f[k]), max(0.0, F[k] + T - B[k] - b[k])) for k in range(len(f))
        ]

    def fit(self, grain: int = 0) -> list[LocalBudget]:
        """The local work that each block has time for, in multiples of `grain` samples.

        At most a micro-batch in a tick, and none where there is time for less than half of one: a
        pass over few samples takes longer than their share, and is worth less than it costs. A
        grain of 0 is a quarter of a micro-batch. The same on every rank that has the same numbers.
        """
        n = self.samples
        grain = grain or (max(2, n // 4) if n > 2 else n)
        fitted, fixed = [], self.fixed or [0.0] * len(self.costs)
        for cost, once, idle in zip(self.costs, fixed, self.idle(), strict=True):
            a_sample = max(sum(cost) - once / n, 1e-30)
            times = (max(0.0, MARGIN * each / LOCAL_COST - once) for each in idle)
            adjoint, activation = (grain * int(time / a_sample / grain) for time in times)
            adjoint = min(adjoint, n // grain * grain)
            budget = LocalBudget(adjoint, min(activation, n // grain * grain - adjoint))
            fitted.append(budget if 2 * sum(budget) >= n else LocalBudget())
        return fitted


def check_budgets(budgets: Sequence[LocalBudget], count: int, micro_batch: int) -> None:
    """ValueError unless each of `count` blocks has a budget, of at most a `micro_batch`."""
    if budgets and len(budgets) != count:
        raise ValueError(
            f"rounds.local_budget has {len(budgets)} pairs for {count} blocks: give one "
            "[before, after] for each block, or leave it empty"
        )
    for k, (adjoint, activation) in enumerate(budgets):
        if adjoint + activation > micro_batch:
            raise ValueError(
                f"rounds.local_budget gives block {k} {adjoint} and {activation} samples, and a "
                f"micro-batch has {micro_batch}: take at most {micro_batch} for each block"
            )


@dataclass(frozen=True)
class Measured:
    """Seconds, timed before training, of a micro-batch."""

    passes: Sequence[float]
    """Its forward and backward pass on each block."""
    fixed: Sequence[float]
    """What of it is there for one sample, too."""
    packing: Sequence[float]
    """What its messages cost each block, before they leave and after they have arrived."""
    messages: Sequence[float]
    """Its message over each cut, alone."""
    occupied: Sequence[float]
    """The same where many follow each other."""


def fit_local_work(
    costs: Sequence[Cost],
    delays: Sequence[int],
    samples: int,
    replays: bool = False,
    measured: Measured | None = None,
) -> list[LocalBudget]:
    """`Pipeline.fit` from counted costs and, if they are long, measured messages.

    The time of passes only tells how long messages are beside them. How it is shared among the
    blocks is counted, so that the timetable is the same everywhere if no message is long.
    """
    alone = Pipeline(costs, delays, samples, replays=replays)
    if measured is None or len(costs) == 1:
        return alone.fit()
    scale = samples * sum(map(sum, costs)) / max(sum(measured.passes), 1e-30)
    messages, occupied, packing, fixed = (
        [scale * each for each in times]
        for times in (measured.messages, measured.occupied, measured.packing, measured.fixed)
    )
    joined = Pipeline(costs, delays, samples, messages, occupied, packing, replays, fixed)
    longest = max(*messages, *occupied)
    return alone.fit() if longest < SHORT * alone.tick() else joined.fit()
