"""How a method's rounds go: what is asked for, and what it wants where nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid.settings.config import RoundSettings
from solvers.base import Recording

if TYPE_CHECKING:
    from solvers import Solver

WINDOW = 4
"""Mini-batches of a window where none is asked for, and of a round without one."""


def settled(method: Solver | type[Solver], rounds: RoundSettings) -> RoundSettings:
    """`rounds` with everything decided that is unset; ValueError for what cannot act.

        exact methods       no windows, no gaps: every round is serial
        the others          `serial_epochs` are serial, too, whatever else is asked for
        that train alone    mini-batches; every `correct_every`-th window, if any, is serial
        that alternate      gaps filled, if they can and nothing else is asked for; else windows

    The same rule for the command, the library and the files they write.
    """
    auto = rounds.window == "auto"
    if not auto:
        why = f"rounds.window is {'unset' if rounds.window is None else repr(rounds.window)}"
        rounds.refuse("rounds", f"{why}, not auto", *_AUTO)
    if method.exact:
        why = f"{method.name!r} has serial steps alone"
        rounds.refuse("rounds", why, "window", "sweeps", *_SERIAL, "fill", *_FILLING)
        return rounds
    if auto and not (method.alternates and issubclass(method.program, Recording)):
        raise ValueError(
            f"rounds.window is 'auto', which follows how records age, but {method.name!r} keeps "
            "none: give a number of mini-batches, or leave it out"
        )
    for name in ("window_limit", "sweeps", "correct_every") if auto else ():
        value = getattr(rounds, name) or 1
        if value & (value - 1):
            below = 1 << (value.bit_length() - 1)
            raise ValueError(
                f"rounds.{name} is {value}, but rounds.window is 'auto', which goes by powers of "
                f"two: give {below} or {2 * below}"
            )
    if not method.alternates:
        return _alone(method.name, rounds)
    every = 1 if rounds.correct_every is None else rounds.correct_every
    asked = rounds.window is not None or rounds.sweeps is not None or every != 1
    fill = method.fills and not asked if rounds.fill is None else rounds.fill
    if not fill:
        rounds.refuse("rounds", "no gaps are filled (rounds.fill)", *_FILLING)
    elif not method.fills:
        raise ValueError(
            f"rounds.fill needs sub-problems that stand by themselves, which {method.name!r} has "
            "none of: leave it out"
        )
    elif every != 1:
        raise ValueError(
            f"rounds.fill works in the gaps of every round's serial phase, but "
            f"rounds.correct_every is {every}: set it to 1, or rounds.fill=false"
        )
    elif auto:
        raise ValueError(
            "rounds.fill works beside windows of one length, but rounds.window is 'auto': give a "
            "number of mini-batches, or rounds.fill=false"
        )
    decided: dict[str, Any] = {"correct_every": every, "fill": fill}
    if asked or not fill:
        decided |= {"window": rounds.window or WINDOW, "sweeps": rounds.sweeps or method.sweeps}
    return rounds.model_copy(update=decided)


def wanted_correction(method: Solver, rounds: RoundSettings, batch_size: int) -> Mapping[str, Any]:
    """Settings of the correction that a method wants for its (decided) rounds."""
    if not method.alternates:
        corrected = rounds.correct_every or rounds.serial_epochs
        return {"micro_batches": method.parts(batch_size)} if corrected else {}
    return {"micro_batches": 4} if rounds.fill else {}


def _alone(name: str, rounds: RoundSettings) -> RoundSettings:
    every = rounds.correct_every or 0
    if every == 1:
        raise ValueError(
            f"rounds.correct_every is 1, so all rounds would be serial and {name!r} would "
            "train nothing: set it to 0 (never serial) or to at least 2"
        )
    rounds.refuse("rounds", f"{name!r} trains on every mini-batch once", "sweeps")
    rounds.refuse("rounds", f"{name!r} fills no gaps", "fill", *_FILLING)
    if not every:
        why = f"{name!r} without serial rounds (rounds.correct_every) has no windows"
        rounds.refuse("rounds", why, "window")
        return rounds.model_copy(update={"correct_every": 0})
    return rounds.model_copy(update={"correct_every": every, "window": rounds.window or WINDOW})


_SERIAL = ("correct_every", "serial_epochs")
_FILLING = ("fill_step", "gaps")
_AUTO = ("window_limit", "residual_limit")
