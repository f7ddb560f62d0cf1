"""Whether a method can train as it is asked to, and everything that is asked for has an effect."""

from __future__ import annotations

from typing import Any

from hybrid.method.facts import Facts
from hybrid.method.options import Options
from hybrid.settings.config import (
    DataSettings,
    OptimizerSettings,
    ScheduleSettings,
    SplitSettings,
)
from hybrid.solvers import acting
from hybrid.solvers.acting import Known


def check(facts: Facts) -> None:
    """ValueError, with the remedy, for the first setting that cannot work or has no effect."""
    facts.solver.check(facts.setup)
    acting.check(sections(facts), known(facts))


def known(facts: Facts) -> Known:
    """The facts by the names that conditions use."""
    options = facts.options
    more: dict[str, Any] = {"command": "train"}
    return Known(**{**vars(options), **vars(facts), **more})


def check_replicas(options: Options) -> None:
    """ValueError for settings of replicas that have no effect on so many of them as there are."""
    given = {
        "sync": options.sync,
        "split": SplitSettings(side_by_side=options.side_by_side),
        "train": options.train,
    }
    acting.check(given, Known(replicas=options.replicas, sync=options.sync))


def sections(facts: Facts) -> dict[str, Any]:
    """The settings of a training by section; what a function of the user's makes has none.

    Those of [links] are checked where it is known how many processes there are.
    """
    options = facts.options
    given = {
        "solver": facts.solver,
        "sync": options.sync,
        "split": SplitSettings(replicas=options.replicas, side_by_side=options.side_by_side),
        "sampler": options.sampler,
        "rounds": facts.rounds,
        "correction": facts.correction,
        "train": options.train,
        "optimizer": options.optimizer,
        "schedule": options.schedule,
        "delay": options.delay,
        "data": DataSettings(cutout=facts.cutout),
    }
    given |= {"checkpoint": options.checkpoint} if hasattr(options, "checkpoint") else {}
    if not isinstance(options.optimizer, OptimizerSettings):
        del given["optimizer"]
    if not isinstance(options.schedule, ScheduleSettings):
        del given["schedule"]
    return given
