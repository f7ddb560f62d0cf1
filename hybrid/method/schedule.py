"""The learning rate as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Any

import torch

from hybrid.errors import format_error, one_line
from hybrid.rounds.epoch_windows import Rate
from hybrid.settings import torch_classes
from hybrid.settings.config import ScheduleSettings


def make_schedule(
    wanted: ScheduleSettings | Rate, peak: float, steps_per_epoch: int, epochs: int
) -> Rate:
    """The schedule of a run.

    ValueError, on one line, for arguments that torch's class does not take and for a learning rate
    that is negative or not finite, at any step of the run.
    """
    total = steps_per_epoch * epochs
    if not isinstance(wanted, ScheduleSettings):
        return Table([_check_rate(_call_schedule(wanted, step), step, "") for step in range(total)])
    if wanted.name in torch_classes.SCHEDULES:
        return Schedule(wanted, peak, steps_per_epoch, epochs)
    every = steps_per_epoch if _interval(wanted) == "epoch" else 1
    rates = _rates_of_torch(wanted, peak, total // every)
    source = f" (schedule.name is {wanted.name!r}, schedule.arguments {wanted.arguments})"
    return Table([_check_rate(rate, i * every, source) for i, rate in enumerate(rates)], every)


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
        warm_up = min(round(self.settings.warmup_epochs * self.steps_per_epoch), total - 1)
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
class Table:
    """The learning rates of a run, each for `every` steps."""

    rates: list[float]
    every: int = 1

    def __call__(self, step: int) -> float:
        """Learning rate of step `step`."""
        return self.rates[step // self.every]


def _interval(settings: ScheduleSettings) -> str:
    by_step = settings.name in ("one-cycle", "OneCycleLR", "CyclicLR")
    return settings.interval or ("step" if by_step else "epoch")


def _rates_of_torch(settings: ScheduleSettings, peak: float, count: int) -> list[float]:
    """The first rates of torch's scheduler, run once on an optimizer that moves nothing."""
    cls: Any = torch_classes.scheduler_class(settings.name)
    arguments = dict(settings.arguments)
    for key, value in {"max_lr": peak, "cycle_momentum": False}.items():
        if torch_classes.takes(cls, key):
            arguments[key] = value
    if torch_classes.takes(cls, "total_steps") and not {"total_steps", "epochs"} & {*arguments}:
        arguments["total_steps"] = count
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
        scheduler = cls(optimizer, **arguments)
        optimizer.step()  # torch warns of a scheduler that steps before its optimizer
        rates = [float(optimizer.param_groups[0]["lr"])]
        for _ in range(count - 1):
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    except Exception as error:
        raise ValueError(
            f"schedule.arguments is {settings.arguments} of {settings.name}, but torch says: "
            f"{one_line(error)}; change it"
        ) from None
    return rates


def _call_schedule(wanted: Rate, step: int) -> object:
    try:
        return wanted(step)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"the schedule fails at step {step}: {format_error(error)}") from error


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
