"""What each block does in the gaps of its passes, settled before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid.cuts.partition import Blocks
from hybrid.settings.config import RoundSettings
from solvers.base import Setup, Solver
from solvers.exact.pipeline import Gaps, fit_gaps


def settled(
    rounds: RoundSettings, blocks: Blocks, inputs: Any, batch_size: int, micro_batches: int
) -> list[Gaps]:
    """Those asked for, or else what fits; ValueError unless each block has one of its own.

    `inputs` is a batch of the network's inputs.
    """
    gaps = [Gaps(*pair) for pair in rounds.gaps]
    if not gaps:
        # counted anew: the cuts alone, which a resumed run has, must give the same gaps
        counted = replace(blocks, costs=[])
        return fit_gaps(counted.block_costs(inputs), batch_size, micro_batches)
    if len(gaps) != len(blocks):
        raise ValueError(
            f"rounds.gaps has {len(gaps)} pairs for {len(blocks)} blocks: give "
            "one [middle, turn] a block, or leave it empty"
        )
    if gaps[-1].middle:
        raise ValueError(
            f"rounds.gaps gives the last block {gaps[-1].middle} samples in the middle of "
            "a pass, where it has no gap: give it [0, turn]"
        )
    return gaps


def check(gaps: Sequence[Gaps], rounds: RoundSettings, solver: Solver, setup: Setup) -> None:
    """ValueError for settings that these gaps leave without an effect."""
    if not setup.fills or len(gaps) == 1:
        return
    if any(map(sum, gaps)):
        return
    why = "no gap of the serial pass has time for a step on 8 samples (see hybrid plan)"
    rounds.refuse("rounds", why, "fill_step")
    if not setup.window:
        solver.refuse_inert(why)
