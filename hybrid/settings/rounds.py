"""What the settings of [rounds] mean for a method: everything decided that is unset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid.settings.config import RoundSettings
from hybrid.settings.round_options import WINDOW, every_round, fills
from hybrid.solvers.acting import Known, check

if TYPE_CHECKING:
    from hybrid.solvers import Solver


def settled(method: Solver, rounds: RoundSettings) -> RoundSettings:
    """`rounds` with everything decided that is unset; ValueError for what has no effect.

        exact methods       no windows, no gaps: every round is serial
        the others          `serial_epochs` are serial, too, whatever else is asked for
        that do not         mini-batches; every `correct_every`-th window, if any, is serial
        alternate
        that alternate      gaps filled, if they can and nothing else is asked for; else windows

    The same rule for the command, the library and the files they write.
    """
    check({"rounds": rounds}, Known(solver=method, rounds=rounds))
    if method.exact:
        return rounds
    every, fill = every_round(method, rounds), fills(method, rounds)
    decided: dict[str, Any] = {"correct_every": every}
    if method.alternates:
        asked = rounds.window is not None or rounds.sweeps is not None or every != 1
        decided["fill"] = fill
        if asked or not fill:
            decided["sweeps"] = rounds.sweeps or method.sweeps
            decided["window"] = rounds.window or WINDOW
    elif every:
        decided["window"] = rounds.window or WINDOW
    return rounds.model_copy(update=decided)


def wanted_correction(method: Solver, rounds: RoundSettings, batch_size: int) -> Mapping[str, Any]:
    """Settings of the correction that a method wants for its (decided) rounds."""
    if not method.alternates:
        corrected = rounds.correct_every or rounds.serial_epochs
        return {"micro_batches": method.num_micro_batches(batch_size)} if corrected else {}
    return {"micro_batches": 4} if rounds.fill else {}
