"""The learning rates as a function of the step, the same on every rank."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import cos, inf, isfinite, nan, pi
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hybrid.errors import counted, format_error, one_line
from hybrid.method.user_optimizer import UserOptimizer, stand_in
from hybrid.rounds.epoch_windows import Rate
from hybrid.settings import torch_classes
from hybrid.settings.config import ScheduleSettings
from hybrid.settings.selection import MODES, check_mode
from hybrid.solvers.numerics.group_rates import GroupRates, momentum
from hybrid.solvers.state import State

Groups = UserOptimizer | torch.optim.Optimizer
"""The owner of the scheduled parameter groups: the user's optimizer, or a block's."""
SchedulerCopy = tuple[LRScheduler, torch.optim.Optimizer]
"""A scheduler and the parameterless optimizer that it moves."""


@dataclass(frozen=True)
class UserScheduler:
    """A scheduler on the user's optimizer, or a function that makes one.

    The object itself is never stepped or changed: a copy moves an optimizer without parameters.
    """

    source: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]
    when: str | None = None
    """When it steps: step or epoch; for ReduceLROnPlateau, the metric that it follows."""

    @classmethod
    def of(cls, value: Any) -> "UserScheduler | None":
        """Convert a scheduler, a function `optimizer` -> scheduler, or a pair of either and when.

        None for anything else, ValueError for a wrong pair.
        """
        pair = value if isinstance(value, tuple) else (value, None)
        source = pair[0] if pair else None
        makes = callable(source) and torch_classes.has_parameter(source, "optimizer")
        if len(pair) == 2 and (isinstance(source, LRScheduler) or makes):
            return cls(*pair)
        if isinstance(value, tuple):
            raise ValueError(
                f"schedule is {repr(value)[:80]}; as a pair it must be (scheduler, when): a "
                "scheduler of torch's or a function that makes it from `optimizer`, and 'step', "
                "'epoch', or the metric of ReduceLROnPlateau"
            )
        return None

    def on(self, groups: Groups) -> SchedulerCopy:
        """Copy the scheduler, or make a new one, on a copy of groups."""
        user = groups if isinstance(groups, UserOptimizer) else None
        if isinstance(self.source, LRScheduler):
            self.check(user)
            assert user is not None
            # with the entries that the scheduler's constructor has added
            optimizer = stand_in(user.optimizer, user.optimizer.param_groups)
            return deepcopy(self.source, {id(user.optimizer): optimizer}), optimizer
        optimizer = _stand_in(groups)
        try:
            scheduler = self.source(optimizer)
        except Exception as error:  # whatever a user's code raises
            raise ValueError(f"the function of the schedule fails: {one_line(error)}") from error
        if not isinstance(scheduler, LRScheduler):
            raise ValueError(
                f"the function of the schedule gave {repr(scheduler)[:80]}: let it return a "
                "scheduler of torch.optim.lr_scheduler on the optimizer that it gets"
            )
        return scheduler, optimizer

    def check(self, user: UserOptimizer | None) -> None:
        """Reject a scheduler object that is not new or is on another optimizer."""
        if not isinstance(self.source, LRScheduler):
            return
        name = type(self.source).__name__
        if user is None or self.source.optimizer is not user.optimizer:
            raise ValueError(
                f"schedule is a {name} on an optimizer that does not train here: give that as "
                "optimizer=, too, or a function that makes the scheduler from `optimizer`"
            )
        inner = getattr(self.source, "_schedulers", [])  # ChainedScheduler itself counts no steps
        done = max(getattr(each, "last_epoch", 0) for each in (self.source, *inner))
        if done > 0:
            raise ValueError(
                f"schedule is a {name} that has made {done} steps: give a new one on a new "
                "optimizer"
            )

    def interval(self, scheduler: LRScheduler) -> str:
        """Return when it steps; ValueError if neither `when` nor the class determines that."""
        name = type(scheduler).__name__
        if self.when in ("step", "epoch"):
            return str(self.when)
        if self.when is not None:
            raise ValueError(f"schedule has a {name} and {self.when!r}; choose 'step' or 'epoch'")
        if name not in torch_classes.BY_STEP:
            raise ValueError(
                f"schedule is a {name}, which may step after every mini-batch or epoch: say which, "
                "as schedule=(scheduler, 'step') or (scheduler, 'epoch')"
            )
        return "step"


def make_schedule(
    wanted: ScheduleSettings | Rate | UserScheduler,
    peak: float,
    steps_per_epoch: int,
    epochs: int,
    groups: Groups | None = None,
) -> Rate:
    """Make the schedule of a run, over the groups of the user's optimizer or else a block's.

    ValueError for arguments that torch's class does not take, and for a learning rate that is
    negative or not finite at any step of the run.
    """
    total = steps_per_epoch * epochs
    if isinstance(wanted, UserScheduler):
        assert groups is not None
        return _from_user(wanted, steps_per_epoch, epochs, groups)
    if not isinstance(wanted, ScheduleSettings):
        return Table([_check_rate(_call_schedule(wanted, step), step, "") for step in range(total)])
    several = groups if isinstance(groups, UserOptimizer) else None
    if wanted.name not in torch_classes.SCHEDULES:
        return _from_torch(wanted, peak, steps_per_epoch, epochs, several)
    if several is None or len(several.groups) == 1:
        return Schedule(wanted, peak, steps_per_epoch, epochs)
    rates, factor = GroupRates(several.rates), Schedule(wanted, 1.0, steps_per_epoch, epochs)
    return lambda step: rates * factor(step)


def _from_user(wanted: UserScheduler, steps_per_epoch: int, epochs: int, groups: Groups) -> Rate:
    scheduler, optimizer = wanted.on(groups)
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        return Plateau(lambda: wanted.on(groups), wanted.when or "loss")
    every = steps_per_epoch if wanted.interval(scheduler) == "epoch" else 1
    try:
        rates = run_ahead(scheduler, optimizer, steps_per_epoch * epochs // every)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(
            f"schedule is a {name} that does not last for {counted(epochs, 'epoch')} of "
            f"{counted(steps_per_epoch, 'step')}: {one_line(error)}"
        ) from error
    _check_rates(rates, every, f" (schedule is a {name})")
    return Table(rates, every)


def _from_torch(
    wanted: ScheduleSettings,
    peak: float,
    steps_per_epoch: int,
    epochs: int,
    user: UserOptimizer | None,
) -> Rate:
    """Make the schedule of a torch class by name; without `user` rates are plain numbers."""
    name = torch_classes.SHORT.get(wanted.name, wanted.name)
    by_step = wanted.interval or ("step" if name in torch_classes.BY_STEP else "epoch")
    every = 1 if by_step == "step" else steps_per_epoch
    count, warm_up = steps_per_epoch * epochs // every, wanted.warm_up(steps_per_epoch)
    groups = torch.optim.SGD([torch.zeros(1, requires_grad=True)], peak) if user is None else user
    cls: Any = torch_classes.scheduler_class(wanted.name)
    arguments = dict(wanted.arguments)
    usual = {"max_lr": [peak] if user is None else user.rates, "cycle_momentum": False}
    if not {"total_steps", "epochs"} & {*arguments}:
        usual["total_steps"] = count
    if wanted.on_plateau and wanted.metric in MODES:
        usual["mode"] = MODES[wanted.metric]
    arguments = {k: v for k, v in usual.items() if torch_classes.takes(cls, k)} | arguments

    def make() -> SchedulerCopy:
        optimizer = _stand_in(groups)
        return cls(optimizer, **arguments), optimizer

    if wanted.on_plateau:
        mode = wanted.arguments.get("mode")
        check_mode("schedule.metric", wanted.metric, mode, "schedule.arguments.mode")
    try:
        if wanted.on_plateau:
            return Plateau(make, wanted.metric, warm_up, plain=user is None)
        rates: Sequence[float] = run_ahead(*make(), count)
    except Exception as error:
        raise ValueError(
            f"schedule.arguments is {wanted.arguments} of {wanted.name}, but torch says: "
            f"{one_line(error)}; change it"
        ) from None
    source = f" (schedule.name is {wanted.name!r}, schedule.arguments {wanted.arguments})"
    _check_rates(rates, every, source)
    return Table([*map(float, rates)] if user is None else rates, every, warm_up)


def _stand_in(groups: Groups) -> torch.optim.Optimizer:
    if isinstance(groups, UserOptimizer):
        return stand_in(groups.optimizer, groups.groups)
    return stand_in(groups, groups.param_groups)


def run_ahead(
    scheduler: LRScheduler, optimizer: torch.optim.Optimizer, count: int
) -> list[GroupRates]:
    """Run a scheduler for `count` intervals, and record the rates and momenta of all groups.

    Exceptions of the scheduler propagate.
    """
    rates, momenta = [], []
    for i in range(count):
        if i:
            scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        momenta.append([*map(momentum, optimizer.param_groups)])
    moves = any(row != momenta[0] for row in momenta)
    return [GroupRates(*row) for row in zip(rates, momenta if moves else [()] * count, strict=True)]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a decay to zero (cosine, linear) or by factors (step).

    During the warm-up the rate of step t = 0, 1, ... is peak (t + 1) / warm_up, so the first step
    has a rate above zero.
    """

    settings: ScheduleSettings
    peak: float
    steps_per_epoch: int
    epochs: int

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
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
class Table:
    """The learning rates of a run, each for `every` steps, with a linear warm-up."""

    rates: Sequence[float]
    every: int = 1
    warm_up: int = 0
    """Steps of linear warm-up."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, or those of groups."""
        rate = self.rates[step // self.every]
        return rate * ((step + 1) / self.warm_up) if step < self.warm_up else rate


class Plateau:
    """The rates of torch's ReduceLROnPlateau, which steps after each test.

    They act from the next step on, and depend only on the step and on earlier measurements, which
    are the same on every rank: a checkpoint keeps these numbers alone.
    """

    def __init__(
        self, make: Callable[[], SchedulerCopy], metric: str, warm_up: int = 0, plain: bool = False
    ) -> None:
        """`make` gives a new scheduler and its optimizer.

        `warm_up`: steps of linear warm-up; `plain`: one group, with a number as its rate.
        """
        self._make, self.metric, self._warm_up, self._plain = make, metric, warm_up, plain
        self._begin()

    def _begin(self) -> None:
        self._scheduler, self._optimizer = self._make()
        self._tests: list[tuple[int, float]] = []
        """The steps and values of tests."""
        self._levels = [(0, self._rates())]
        """The rates, with the steps from which they hold."""

    def _rates(self) -> GroupRates:
        return GroupRates(float(group["lr"]) for group in self._optimizer.param_groups)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, or those of groups."""
        rates = next(rates for start, rates in reversed(self._levels) if start <= step)
        if step < self._warm_up:
            rates = rates * ((step + 1) / self._warm_up)
        return float(rates) if self._plain else rates

    def take(self, results: Mapping[str, float], step: int) -> None:
        """Step the scheduler on the results of a test after `step` steps."""
        value = results[self.metric]
        self._tests.append((step, value))
        self._scheduler.step(value)  # type: ignore[arg-type]  # as ReduceLROnPlateau has it
        if (rates := self._rates()).rates != self._levels[-1][1].rates:
            self._levels.append((step, rates))

    def state(self) -> State:
        """Return the tests as JSON numbers; NaN is None, and infinities are texts."""
        tests = [[step, _written(value)] for step, value in self._tests]
        return State(shared={"tests": tests} if tests else {})

    def load_state(self, state: State) -> None:
        self._begin()
        for step, value in state.shared.get("tests", []):
            self.take({self.metric: nan if value is None else float(value)}, int(step))


def _written(value: float) -> float | str | None:
    if isfinite(value):
        return value
    return str(value) if value in (inf, -inf) else None


def _call_schedule(wanted: Rate, step: int) -> object:
    try:
        return wanted(step)
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"the schedule fails at step {step}: {format_error(error)}") from error


def _check_rates(rates: Sequence[float], every: int, source: str) -> None:
    """Reject rates that are negative or not finite; each holds for `every` steps."""
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
