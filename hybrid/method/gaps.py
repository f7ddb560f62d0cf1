"""What each block does in the gaps of its passes, settled before a run starts."""

from __future__ import annotations

from dataclasses import replace

from hybrid.method.problem import Problem
from hybrid.settings.config import RoundSettings
from hybrid.solvers.exact.gaps import Gaps, fit_gaps


def settled_gaps(
    rounds: RoundSettings, problem: Problem, batch_size: int, micro_batches: int
) -> tuple[Gaps, ...]:
    """The gaps that were asked for, or else what fits; ValueError unless each block has its own."""
    if not rounds.fill:
        return ()
    blocks, gaps = problem.blocks, tuple(Gaps(*pair) for pair in rounds.gaps)
    if not gaps:
        # counted anew: the cuts alone, which a resumed run has, must give the same gaps
        counted = replace(blocks, costs=[])
        return tuple(fit_gaps(counted.block_costs(problem.inputs), batch_size, micro_batches))
    if len(gaps) != len(blocks):
        raise ValueError(
            f"rounds.gaps has {len(gaps)} pairs for {len(blocks)} blocks: give "
            "one [middle, turn] for each block, or leave it empty"
        )
    if gaps[-1].middle:
        raise ValueError(
            f"rounds.gaps gives the last block {gaps[-1].middle} samples in the middle of "
            "a pass, where it has no gap: give it [0, turn]"
        )
    return gaps
