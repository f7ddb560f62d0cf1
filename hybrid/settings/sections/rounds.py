"""[rounds]: how serial corrections and parallel phases alternate.

The same declarations are keywords of the library and a table of the TOML file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from hybrid.settings.sections.base import LARGE, MANY, Section, field_docs
from hybrid.solvers import registry
from hybrid.solvers.acting import Acts, Facts, Needs, check

if TYPE_CHECKING:
    from hybrid.solvers import Solver

WINDOW = 4
"""Default number of mini-batches of a window, and of a round without windows."""

_Count = Annotated[int, Field(ge=0)]


def every_round(solver: Any, rounds: Any) -> int:
    """Return `correct_every`, or its default for the solver if it is unset."""
    every: int | None = rounds.correct_every
    return int(solver.alternates) if every is None else every


def default_solver(rounds: Mapping[str, Any], fill: object) -> str:
    """Choose the method of a run that names none; `rounds` may not be validated yet.

    It sweeps over windows if the run sets windows without corrections, and names no local method,
    `fill`, for idle time.
    """
    every, window = rounds.get("correct_every"), rounds.get("window")
    corrected = every not in (None, 0, 1) or rounds.get("serial_end")
    windowed = rounds.get("sweeps") is not None or every == 1 or (window and not corrected)
    unfilled = fill == registry.LOCAL_METHODS.default
    return registry.WINDOWED if windowed and unfilled else registry.DEFAULT


def _last_start(run: Facts) -> int:
    """Return the first mini-batch of the last round."""
    return int(run.train.epochs * run.steps - 1 - (run.steps - 1) % run.setup.window)


def _solver(run: Facts) -> str:
    return f"it is {run.solver.name!r}"


INEXACT = Acts("the solver is not exact", lambda run: not run.solver.exact, here=_solver)
ALTERNATES = Acts("the solver sweeps over windows", lambda run: run.solver.alternates, here=_solver)
HAS_WINDOWS = Acts(
    "the solver sweeps over windows, or there are serial rounds",
    lambda run: (
        run.solver.alternates
        or every_round(run.solver, run.rounds)
        or (run.rounds.serial_end and not run.solver.exact)
    ),
    here=_solver,
)
PLAIN_BATCHES = Needs(
    "there is no batch_transform, whose mini-batches window 'all' could not repeat",
    lambda run: run.rounds.window != "all" or run.batch_transform is None,
    "give a number of mini-batches, or leave it out",
)
IN_ANY_ORDER = Needs(
    "the training data are no stream, which window 'all' would have to keep",
    lambda run: run.rounds.window != "all" or not run.streamed,
    "give a number of mini-batches",
)
TRAINS_BETWEEN = Needs(
    "it is 0 or at least 2, because with 1 the solver trains nothing",
    lambda run: run.solver.alternates or run.rounds.correct_every != 1,
    "set it to 0 (never serial) or to at least 2",
)
ENDS_BEFORE_LAST = Needs(
    "a round is left for the solver to train in",
    lambda run: run.setup.serial_steps <= _last_start(run),
    "take fewer serial epochs, or more train.epochs",
    here=lambda run: f"train.epochs is {run.train.epochs}, in rounds of {run.setup.window}",
)
LOCAL_WORK = Acts("idle ranks take local steps", lambda run: run.setup.local_work)
CAN_CLOSE = Acts(
    "the solver is neither exact nor alternates with corrections",
    lambda run: not run.solver.alternates and not run.solver.exact,
    here=_solver,
)


@dataclass(kw_only=True)
class RoundOptions:
    """The settings of [rounds] as keywords; `RoundSettings` validates them."""

    window: Annotated[
        int | Literal["all"] | None, INEXACT, HAS_WINDOWS, PLAIN_BATCHES, IN_ANY_ORDER
    ] = None
    """Mini-batches per round, trained by exact passes, then by sweeps; all: the training set;
    unset: 4."""
    sweeps: Annotated[int | None, Field(ge=1, le=10**6), ALTERNATES] = None
    """Sweeps over each window; unset: the solver's default."""
    correct_every: Annotated[int | None, Field(ge=0, le=MANY), INEXACT, TRAINS_BETWEEN] = None
    """Exact passes come first in every N-th round; 0: never; unset: 1, or 0 for a method that
    needs no correction."""
    serial_epochs: Annotated[float, Field(ge=0, le=MANY), INEXACT, ENDS_BEFORE_LAST] = 0.0
    """Initial epochs of exact training only, without delays or local steps."""
    serial_end: Annotated[bool, CAN_CLOSE] = False
    """End each epoch with a serial round, without delays, before the test."""
    local_budget: Annotated[Sequence[tuple[_Count, _Count]], LOCAL_WORK] = ()
    """Local samples per tick for each block, [before, after] its backward pass; empty:
    predicted."""
    memory_gb: Annotated[float, Field(gt=0, le=LARGE)] = 4.0
    """Most memory for a rank's auxiliary variables, in GB (10^9 bytes)."""


class RoundSettings(Section, RoundOptions):
    """[rounds] the alternation of serial correction and parallel phase."""

    def serial_steps(self, steps: int) -> int:
        """Return the number of steps in `serial_epochs`, at least 1 if there are any."""
        return max(ceil(round(self.serial_epochs * steps, 6)), 1) if self.serial_epochs else 0

    @field_validator("window", mode="before")
    @classmethod
    def _a_number_or_all(cls, window: object) -> object:
        if window not in ("all", None) and not (isinstance(window, int) and window >= 1):
            raise ValueError("it must be an integer of at least 1, or all")
        return window

    @field_validator("local_budget", mode="before")
    @classmethod
    def _as_tuples(cls, pairs: object) -> object:
        if not isinstance(pairs, list | tuple):
            raise ValueError("it must be a list of pairs [before, after]")
        return tuple(tuple(x) if isinstance(x, list) else x for x in pairs)


for _name, _help in field_docs(RoundOptions).items():
    RoundSettings.model_fields[_name].description = _help


def resolve_rounds(solver: "Solver", rounds: RoundSettings) -> RoundSettings:
    """Fill in the open choices of `rounds`.

        exact methods       no windows: every round is serial
        the others          `serial_epochs` are serial, too, whatever else is asked for
        that do not         mini-batches; every `correct_every`-th window, if any, is serial, and
        alternate           with `serial_end` the last one of an epoch
        that alternate      windows

    The command, the library and their files follow the same rule. ValueError for settings without
    effect.
    """
    check({"rounds": rounds}, Facts(solver=solver, rounds=rounds))
    if solver.exact:
        return rounds
    every = every_round(solver, rounds)
    decided: dict[str, Any] = {"correct_every": every}
    if solver.alternates:
        decided["sweeps"] = rounds.sweeps or solver.sweeps
    if solver.alternates or every or rounds.serial_end:
        decided["window"] = rounds.window or WINDOW
    return rounds.model_copy(update=decided)
