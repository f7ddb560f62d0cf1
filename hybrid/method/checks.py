"""Whether a method can train as it is asked to, and all that is asked for would act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from hybrid.method.facts import Facts
from hybrid.method.replica_checks import check_replicas
from hybrid.samplers.base import Learning
from hybrid.settings.config import OptimizerSettings
from hybrid.settings.rounds import WINDOW
from solvers.base import Recording
from solvers.exact.exact_pass import PassSettings


def check_method(facts: Facts) -> None:
    """ValueError, with the remedy, for settings that cannot work or would change nothing."""
    solver, setup, train = facts.solver, facts.setup, facts.options.train
    solver.check(setup)
    check_replicas(facts)
    _check_corrections(facts)
    if setup.fills and train.precision == "float16":
        raise ValueError(
            "rounds.fill adds gradients of several passes, and train.precision is 'float16', "
            "whose scale may change between them: choose bfloat16, or give a --window"
        )
    if not solver.captures:
        train.refuse("train", f"{solver.name!r} has no static steps to capture", "graphs")
    if not torch.cuda.is_available():
        train.refuse("train", "there is no GPU", "graphs")
    if train.graphs and train.precision == "float16":
        raise ValueError(
            "train.graphs is true and train.precision is 'float16', whose loss scale waits for "
            "the GPU at every step: choose bfloat16, or train.graphs=false"
        )
    if facts.draws and (train.graphs or train.compile):
        raise ValueError(
            f"train.{'graphs' if train.graphs else 'compile'} is true, but layers of the model "
            "draw random numbers, which then would not be repeatable: leave it out"
        )


def _check_corrections(facts: Facts) -> None:
    solver, setup, name = facts.solver, facts.setup, facts.solver.name
    optimizer = facts.options.optimizer
    if setup.corrects or setup.fills:
        return
    if not solver.alternates:
        _refuse(facts, f"{name!r} has no corrections here", [f.name for f in fields(PassSettings)])
        return
    why = "rounds.correct_every is 0, and a forward pass alone has no use for it"
    _refuse(facts, why, ["micro_batches", "clip_norm", "recompute"])
    if solver.own_momentum and isinstance(optimizer, OptimizerSettings):
        why = f"all steps are local ones, and {name!r} has a momentum of its own"
        optimizer.refuse("optimizer", why, "momentum")
        if "momentum" in optimizer.arguments:
            raise ValueError(f"optimizer.arguments has a momentum, but {why}: leave it out")


def _refuse(facts: Facts, why: str, names: Sequence[str]) -> None:
    solver, plain = facts.solver, PassSettings()
    for name in names:
        value, default = getattr(facts.correction, name), getattr(plain, name)
        if value != default:
            own = solver.exact and hasattr(solver, name)
            meant = f", or set solver.{name}={value}" if own else ""
            raise ValueError(
                f"correction.{name} is {value!r}, but {why}, so it would change nothing: "
                f"leave it out or, where a run that goes on has it, set it to {default!r}{meant}"
            )


def check_rounds(facts: Facts) -> None:
    """ValueError for rounds that leave the method nothing to train."""
    rounds, train, steps, length = (
        facts.rounds,
        facts.options.train,
        facts.steps,
        facts.round_batches,
    )
    # windows that follow residuals keep their first length while there are none
    size = min(length, WINDOW) if rounds.window == "auto" else length
    last = train.epochs * steps - 1 - (steps - 1) % size
    if facts.setup.serial_steps > last:
        raise ValueError(
            f"rounds.serial_epochs is {rounds.serial_epochs:g} and train.epochs "
            f"{train.epochs}, so all rounds, of {size} mini-batches, would be serial and "
            f"{facts.solver.name!r} would train nothing: take fewer of them, or more --epochs"
        )


def check_sampler(facts: Facts) -> None:
    """ValueError for a sampler that learns from losses which the rounds do not report in time."""
    sampler, solver, rounds = facts.options.sampler, facts.solver, facts.rounds
    length = facts.round_batches
    if not isinstance(sampler, Learning):
        return
    who = f"sampler {sampler.name!r} learns from losses"
    if rounds.window == "all":
        raise ValueError(
            f"rounds.window is all, and {who}, which come after the epoch has been chosen: "
            "give a number of mini-batches, or sampler.name=uniform"
        )
    if sampler.lag < length:
        raise ValueError(
            f"sampler.lag is {sampler.lag}; it must be at least {length}, the mini-batches of "
            "a window (--window), which are chosen together"
        )
    records = issubclass(solver.program, Recording) or rounds.correct_every == 1
    if not solver.reports_losses or (solver.alternates and not records):
        why = "solver.any_order" if not solver.repeatable else f"{solver.name!r} here"
        other = (
            "another solver or rounds.correct_every=1" if solver.alternates else "another solver"
        )
        raise ValueError(
            f"{who} of all samples in the order of their mini-batches, which {why} does not "
            f"tell: take {other}, or sampler.name=uniform"
        )
