"""The settings of [rounds], as the library's keywords and as a table of the TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.settings.limits import LARGE, MANY
from hybrid.solvers.acting import HAVE_TIME, Acts, Needs
from hybrid.solvers.exact.gaps import FillStep

WINDOW = 4
"""Mini-batches of a window where none is asked for, and of a round without one."""

_Count = Annotated[int, Field(ge=0)]


def every_round(solver: Any, rounds: Any) -> int:
    """`correct_every`, decided where it is unset."""
    every: int | None = rounds.correct_every
    return int(solver.alternates) if every is None else every


def fills(solver: Any, rounds: Any) -> bool:
    """`fill`, decided where it is unset."""
    if rounds.fill is not None or not solver.alternates:
        return bool(rounds.fill and solver.alternates)
    asked = rounds.window is not None or rounds.sweeps is not None
    return bool(solver.fills and not asked) and every_round(solver, rounds) == 1


def _power_of_two(name: str) -> Needs:
    return Needs(
        "it is a power of two, as rounds.window 'auto' takes them",
        lambda run: run.rounds.window != "auto" or not (n := getattr(run.rounds, name)) & (n - 1),
        "give a power of two",
    )


def _last_start(run: Any) -> int:
    """The first mini-batch of the last round; rounds of window auto start short."""
    size = run.round_batches
    size = min(size, WINDOW) if run.rounds.window == "auto" else size
    return int(run.train.epochs * run.steps - 1 - (run.steps - 1) % size)


def _solver(run: Any) -> str:
    return f"it is {run.solver.name!r}"


INEXACT = Acts(
    "the solver is not exact, whose steps are all serial",
    lambda run: not run.solver.exact,
    here=_solver,
)
ALTERNATES = Acts(
    "the solver sweeps over windows, by turns with corrections",
    lambda run: run.solver.alternates,
    here=_solver,
)
HAS_WINDOWS = Acts(
    "the solver sweeps over windows, or serial rounds come between its own (rounds.correct_every)",
    lambda run: run.solver.alternates or every_round(run.solver, run.rounds),
    here=_solver,
)
AUTO_OF_RECORDS = Needs(
    "the solver keeps records, whose age 'auto' follows",
    lambda run: run.rounds.window != "auto" or (run.solver.alternates and run.solver.records),
    "give a number of mini-batches, or leave it out",
    here=_solver,
)
PLAIN_BATCHES = Needs(
    "there is no batch_transform, whose mini-batches window 'all' would not give again",
    lambda run: run.rounds.window != "all" or run.batch_transform is None,
    "give a number of mini-batches, or leave it out",
)
AUTO = Acts("rounds.window is 'auto'", lambda run: run.rounds.window == "auto")
TRAINS_BETWEEN = Needs(
    "it is 0 or at least 2, because with 1 all rounds are serial and the solver trains nothing",
    lambda run: run.solver.alternates or run.rounds.correct_every != 1,
    "set it to 0 (never serial) or to at least 2",
)
ENDS_BEFORE_LAST = Needs(
    "a round is left that is not serial, for the solver to train in",
    lambda run: run.setup.serial_steps <= _last_start(run),
    "take fewer serial epochs, or more --epochs",
    here=lambda run: f"train.epochs is {run.train.epochs}, in rounds of {run.round_batches}",
)
CAN_FILL = Needs(
    "the solver has sub-problems that stand by themselves",
    lambda run: not run.rounds.fill or run.solver.fills,
    here=_solver,
)
FILLS_EVERY_ROUND = Needs(
    "every round has a serial phase, with gaps to fill (rounds.correct_every is 1)",
    lambda run: not run.rounds.fill or every_round(run.solver, run.rounds) == 1,
    "set rounds.correct_every=1, or rounds.fill=false",
)
FILLS_ONE_LENGTH = Needs(
    "windows have one length (rounds.window is not 'auto')",
    lambda run: not run.rounds.fill or run.rounds.window != "auto",
    "give a number of mini-batches, or rounds.fill=false",
)
FILLS = Acts("gaps are filled (rounds.fill)", lambda run: fills(run.solver, run.rounds))


@dataclass(kw_only=True)
class RoundOptions:
    """How serial corrections and parallel phases alternate; `RoundSettings` validates them."""

    window: Annotated[
        int | Literal["all", "auto"] | None, INEXACT, HAS_WINDOWS, AUTO_OF_RECORDS, PLAIN_BATCHES
    ] = None
    """The mini-batches of a round: exact passes train on them, and sweeps go over them. Give a
    number (4), all (the training set, whose variables are kept) or auto (a few, and more as the
    learning rate falls); unset: none if gaps are filled, else 4."""
    window_limit: Annotated[int, Field(ge=1, le=MANY), AUTO, _power_of_two("window_limit")] = 64
    """The most mini-batches that window auto takes, a power of two."""
    residual_limit: Annotated[float, Field(gt=0, le=LARGE), AUTO] = 0.1
    """Relative residual of a cut over which window auto goes a step back."""
    sweeps: Annotated[int | None, Field(ge=1, le=10**6), ALTERNATES, _power_of_two("sweeps")] = None
    """Passes over a window's sub-problems, of auto the most; unset: as many as the solver wants."""
    correct_every: Annotated[
        int | None,
        Field(ge=0, le=MANY),
        INEXACT,
        TRAINS_BETWEEN,
        _power_of_two("correct_every"),
    ] = None
    """In which rounds exact passes train, the serial phase: give 1 for each, 4 for every fourth, 0
    for none; unset: 1, or 0 for a method that trains by itself."""
    serial_epochs: Annotated[float, Field(ge=0, le=MANY), INEXACT, ENDS_BEFORE_LAST] = 0.0
    """Epochs at the start whose rounds are serial alone: no delay, no local steps."""
    fill: Annotated[bool | None, ALTERNATES, CAN_FILL, FILLS_EVERY_ROUND, FILLS_ONE_LENGTH] = None
    """Local steps in the gaps of the serial pass; unset: if the method can and has no window."""
    fill_step: Annotated[FillStep, FILLS, HAVE_TIME] = "added"
    """A filled gap's gradient: added to the exact one, or stepped on its own."""
    gaps: Annotated[Sequence[tuple[_Count, _Count]], FILLS] = ()
    """Samples each block has time for, [middle, turn] of a pass; empty: by counted operations."""
    memory_gb: Annotated[float, Field(gt=0, le=LARGE)] = 4.0
    """Largest store of auxiliary variables a rank may hold, in GB (10^9 bytes)."""
