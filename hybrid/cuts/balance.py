"""Contiguous runs of units with about equal cost."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

ALL = 0.95
"""Share of the cost from which one block is said to have nearly all of it."""


def balance_starts(costs: Sequence[float], blocks: int) -> list[int]:
    """Starts of `blocks` contiguous runs whose largest sum is smallest.

    The solution is exact, by dynamic programming. Among equal ones the sum of squares decides, then
    the earlier cut.
    """
    sums = [0.0, *accumulate(costs)]
    peak, _ = _best_runs(sums, blocks, max)
    _, starts = _best_runs(
        sums, blocks, lambda squares, run: squares + run**2 if run <= peak else inf
    )
    return starts


def describe_imbalance(names: Sequence[str], shares: Sequence[float]) -> list[str]:
    """A notice if one block has nearly all of the cost."""
    most = max(shares, default=0.0)
    if len(shares) < 2 or most <= ALL:
        return []
    number = shares.index(most)
    return [
        f"block {number} ({names[number]}) has {most:.0%} of the cost, so {len(shares)} blocks are "
        "hardly faster than one: give its modules as units, let split.inside (inside=True) cut "
        "units, or take one block"
    ]


def _best_runs(
    sums: Sequence[float], blocks: int, extend: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The smallest score and its starts; `extend` adds a run to a score."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(blocks):
        best = {
            end: min(
                (extend(score, sums[end] - sums[start]), [*starts, start])
                for start, (score, starts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(sums))
        }
    return best[len(sums) - 1]
