"""Whether a method can train as it is asked to, and all that is asked for would act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from hybrid.method.options import Options
from hybrid.method.replica_checks import check_replicas
from hybrid.method.setup import Method
from hybrid.samplers.base import Learning
from hybrid.settings.config import OptimizerSettings, RoundSettings
from hybrid.settings.rounds import WINDOW
from solvers.base import Recording
from solvers.exact.exact_pass import PassSettings


def check_method(options: Options, method: Method, survival: float, draws: bool) -> None:
    """ValueError, with the remedy, for settings that cannot work or would change nothing.

    `survival` is the least probability that a unit is there in a pass; `draws`: whether layers
    draw random numbers.
    """
    solver, setup, train = method.solver, method.setup, options.train
    solver.check(setup)
    check_replicas(options, solver, setup, method.statistics, survival)
    _check_corrections(options, method)
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
    if draws and (train.graphs or train.compile):
        raise ValueError(
            f"train.{'graphs' if train.graphs else 'compile'} is true, but layers of the model "
            "draw random numbers, which then would not be repeatable: leave it out"
        )


def _check_corrections(options: Options, method: Method) -> None:
    solver, setup, name = method.solver, method.setup, method.solver.name
    if setup.corrects or setup.fills:
        return
    if not solver.alternates:
        _refuse(method, f"{name!r} has no corrections here", [f.name for f in fields(PassSettings)])
        return
    why = "rounds.correct_every is 0, and a forward pass alone has no use for it"
    _refuse(method, why, ["micro_batches", "clip_norm", "recompute"])
    if solver.own_momentum and isinstance(options.optimizer, OptimizerSettings):
        why = f"all steps are local ones, and {name!r} has a momentum of its own"
        options.optimizer.refuse("optimizer", why, "momentum")
        if "momentum" in options.optimizer.arguments:
            raise ValueError(f"optimizer.arguments has a momentum, but {why}: leave it out")


def _refuse(method: Method, why: str, names: Sequence[str]) -> None:
    solver, plain = method.solver, PassSettings()
    for name in names:
        value, default = getattr(method.correction, name), getattr(plain, name)
        if value != default:
            own = solver.exact and hasattr(solver, name)
            meant = f", or set solver.{name}={value}" if own else ""
            raise ValueError(
                f"correction.{name} is {value!r}, but {why}, so it would change nothing: "
                f"leave it out or, where a run that goes on has it, set it to {default!r}{meant}"
            )


def check_rounds(
    options: Options, method: Method, rounds: RoundSettings, steps: int, length: int
) -> None:
    """ValueError for (decided) rounds that leave the method nothing to train.

    `steps`: mini-batches of an epoch; `length`: of the longest window.
    """
    # windows that follow residuals keep their first length while there are none
    size = min(length, WINDOW) if rounds.window == "auto" else length
    last = options.train.epochs * steps - 1 - (steps - 1) % size
    if method.setup.serial_steps > last:
        raise ValueError(
            f"rounds.serial_epochs is {rounds.serial_epochs:g} and train.epochs "
            f"{options.train.epochs}, so all rounds, of {size} mini-batches, would be serial and "
            f"{method.solver.name!r} would train nothing: take fewer of them, or more --epochs"
        )


def check_sampler(options: Options, method: Method, rounds: RoundSettings, length: int) -> None:
    """ValueError for a sampler that learns from losses which (decided) rounds do not tell in time.

    `length`: mini-batches of the longest window.
    """
    sampler, solver = options.sampler, method.solver
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
