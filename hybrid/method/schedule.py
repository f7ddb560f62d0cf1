"""The learning rates as a function of the step, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, isfinite, pi
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hybrid.errors import counted, format_error, one_line
from hybrid.method.given_optimizer import GivenOptimizer, stand_in
from hybrid.method.given_scheduler import GivenScheduler, Groups, Rows, run_ahead
from hybrid.method.plateau import Made, Plateau, plateau_maker
from hybrid.rounds.epoch_windows import Rate
from hybrid.settings import torch_classes
from hybrid.settings.config import ScheduleSettings
from hybrid.solvers.numerics.group_rates import GroupRates


def make_schedule(
    wanted: ScheduleSettings | Rate | GivenScheduler,
    peak: float,
    steps_per_epoch: int,
    epochs: int,
    groups: Groups | None = None,
) -> Rate:
    """The schedule of a run, over the groups of the user's optimizer or, if it has none, a block's.

    ValueError, on one line, for arguments that torch's class does not take and for a learning rate
    that is negative or not finite, at any step of the run.
    """
    total = steps_per_epoch * epochs
    given = groups if isinstance(groups, GivenOptimizer) else None
    if isinstance(wanted, GivenScheduler):
        assert groups is not None
        return _of_object(wanted, steps_per_epoch, epochs, groups)
    if not isinstance(wanted, ScheduleSettings):
        return Table([_check_rate(_call_schedule(wanted, step), step, "") for step in range(total)])
    if wanted.name in torch_classes.SCHEDULES:
        if given is None or len(given.rates) == 1:
            return Schedule(wanted, peak, steps_per_epoch, epochs)
        return Multiples(Schedule(wanted, 1.0, steps_per_epoch, epochs), given.rates)
    warm_up = wanted.warm_up(steps_per_epoch)
    moved = partial(_one_group, peak) if given is None else given.stand_in
    if wanted.on_plateau:
        make = plateau_maker(moved, wanted.arguments, wanted.metric)
        return Plateau(make, wanted.metric, warm_up, plain=given is None)
    every = steps_per_epoch if _interval(wanted) == "epoch" else 1
    rates: Sequence[float] = _rates_of_torch(wanted, moved(), total // every)
    source = f" (schedule.name is {wanted.name!r}, schedule.arguments {wanted.arguments})"
    _check_rates(rates, every, source)
    return Table([*map(float, rates)] if given is None else rates, every, warm_up)


def _of_object(wanted: GivenScheduler, steps_per_epoch: int, epochs: int, groups: Groups) -> Rate:
    """Of a scheduler that the user has made, or a function for it."""
    scheduler, optimizer = wanted.on(groups)
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        return Plateau(partial(_plateau_of, wanted, groups), wanted.when or "loss")
    every = steps_per_epoch if wanted.interval(scheduler) == "epoch" else 1
    try:
        rows = run_ahead(scheduler, optimizer, steps_per_epoch * epochs // every)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(
            f"schedule is a {name} that does not last for {counted(epochs, 'epoch')} of "
            f"{counted(steps_per_epoch, 'step')}: {one_line(error)}"
        ) from error
    _check_rates(rows, every, f" (schedule is a {name})")
    return Table(rows, every)


def _plateau_of(wanted: GivenScheduler, groups: Groups) -> Made:
    scheduler, optimizer = wanted.on(groups)
    assert isinstance(scheduler, ReduceLROnPlateau)
    return scheduler, optimizer


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a fall to zero (cosine, linear) or by factors (step).

    Step t = 0, 1, ... of `total`; during the warm-up the rate is peak (t + 1) / warm_up, so the
    first step is not wasted on a rate of zero.
    """

    settings: ScheduleSettings
    peak: float
    steps_per_epoch: int
    epochs: int

    def __call__(self, step: int) -> float:
        """Learning rate of step `step`."""
        total = self.steps_per_epoch * self.epochs
        warm_up = min(self.settings.warm_up(self.steps_per_epoch), total - 1)
        if step < warm_up:
            return self.peak * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, total - warm_up)
        if self.settings.name == "cosine":
            return self.peak * 0.5 * (1 + cos(pi * progress))
        if self.settings.name == "linear":
            return self.peak * (1 - progress)
        if self.settings.name == "step":
            passed = sum(step >= share * total for share in self.settings.milestones)
            return self.peak * self.settings.gamma**passed
        return self.peak


@dataclass(frozen=True)
class Multiples:
    """The learning rates of several groups, all of which fall alike."""

    factor: Rate
    """The share of its own rate that a group has at a step."""
    rates: Sequence[float]

    def __call__(self, step: int) -> float:
        """Learning rates of step `step`."""
        return GroupRates(self.rates) * self.factor(step)


@dataclass(frozen=True)
class Table:
    """The learning rates of a run, each for `every` steps; the first steps have a part of them."""

    rates: Sequence[float]
    every: int = 1
    warm_up: int = 0
    """Steps of linear warm-up."""

    def __call__(self, step: int) -> float:
        """Learning rate of step `step`, or those of groups."""
        rate = self.rates[step // self.every]
        return rate * ((step + 1) / self.warm_up) if step < self.warm_up else rate


def _interval(settings: ScheduleSettings) -> str:
    name = torch_classes.SHORT.get(settings.name, settings.name)
    return settings.interval or ("step" if name in torch_classes.BY_STEP else "epoch")


def _one_group(peak: float) -> torch.optim.Optimizer:
    """An optimizer with one group, at the peak, that moves nothing."""
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    return stand_in(sgd, sgd.param_groups)


def _rates_of_torch(
    settings: ScheduleSettings, optimizer: torch.optim.Optimizer, count: int
) -> Rows:
    """The first rates of torch's scheduler, run once on an optimizer that moves nothing."""
    cls: Any = torch_classes.scheduler_class(settings.name)
    arguments = dict(settings.arguments)
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    for key, value in {"max_lr": peaks, "cycle_momentum": False}.items():
        if torch_classes.takes(cls, key):
            arguments[key] = value
    if torch_classes.takes(cls, "total_steps") and not {"total_steps", "epochs"} & {*arguments}:
        arguments["total_steps"] = count
    try:
        return run_ahead(cls(optimizer, **arguments), optimizer, count)
    except Exception as error:
        raise ValueError(
            f"schedule.arguments is {settings.arguments} of {settings.name}, but torch says: "
            f"{one_line(error)}; change it"
        ) from None


def _call_schedule(wanted: Rate, step: int) -> object:
    try:
        return wanted(step)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"the schedule fails at step {step}: {format_error(error)}") from error


def _check_rates(rates: Sequence[float], every: int, source: str) -> None:
    """ValueError for a rate of any group that cannot be; each holds for `every` steps."""
    for i, rate in enumerate(rates):
        for each in rate.rates if isinstance(rate, GroupRates) else [rate]:
            _check_rate(each, i * every, source)


def _check_rate(value: object, step: int, source: str) -> float:
    try:
        rate = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        rate = -1.0
    if not (isfinite(rate) and rate >= 0):
        raise ValueError(
            f"the schedule gives {value!r} at step {step}{source}: let it give a finite learning "
            "rate of at least 0"
        )
    return rate
