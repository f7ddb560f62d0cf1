"""What a run does when it diverges: back to a checkpoint, and on from it with smaller steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.rounds.report import DivergedError


def target(found: Sequence[Path], rollbacks: Sequence[dict[str, Any]], kept_since: bool) -> Path:
    """The checkpoint to go back to, of those there are, oldest first.

    The newest or, if none has been written since the last roll-back, the one before its.
    """
    if not kept_since:
        found = [f for f in found if int(f.name) < rollbacks[-1]["to"]] or found[:1]
    return found[-1]


def rates(rollbacks: int, local: bool) -> dict[str, float]:
    """Step sizes after so many roll-backs.

    The first halves local steps, if there are any; each later one halves all steps.
    """
    return {"local": 0.5**rollbacks, "exact": 0.5 ** max(rollbacks - local, 0)}


def remedy(
    error: DivergedError,
    learning_rate: float,
    clipping: Sequence[str],
    rollbacks: int,
    newest: Path | None,
    kept: bool,
) -> str:
    """What to do about it; `clipping` are the settings that bound gradients where it happened."""
    lower = f"lower --lr (now {learning_rate:g})"
    if clipping:
        lower += f" or set {' or '.join(clipping)}"
    if not kept:
        return f"{error}; {lower}"
    good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"
    tried = f"{rollbacks} roll-backs did not help; " if rollbacks else ""
    return f"{error}; {tried}{good}; {lower}"
