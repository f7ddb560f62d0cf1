"""The learning rate as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, isfinite, pi

from hybrid.errors import format_error
from hybrid.rounds.windows import Rate
from hybrid.settings.config import ScheduleSettings


def make_schedule(
    wanted: ScheduleSettings | Rate, peak: float, steps_per_epoch: int, epochs: int
) -> Rate:
    """The schedule of a run.

    ValueError, on one line, for a function that gives a learning rate which is negative or not
    finite, at any step of the run.
    """
    if isinstance(wanted, ScheduleSettings):
        return Schedule(wanted, peak, steps_per_epoch, epochs)
    rates = [_call_schedule(wanted, step) for step in range(steps_per_epoch * epochs)]
    return rates.__getitem__


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


def _call_schedule(wanted: Rate, step: int) -> float:
    try:
        value: object = wanted(step)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"the schedule fails at step {step}: {format_error(error)}") from error
    try:
        rate = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        rate = -1.0
    if not (isfinite(rate) and rate >= 0):
        raise ValueError(
            f"the schedule gives {value!r} at step {step}: let it give a finite learning rate of "
            "at least 0"
        )
    return rate
