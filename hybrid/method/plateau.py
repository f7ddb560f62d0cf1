"""A learning rate that falls when a tested metric no longer improves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite, nan
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hybrid.errors import one_line
from hybrid.settings.selection import MODES, check_mode
from hybrid.solvers.numerics.group_rates import GroupRates
from hybrid.solvers.state import State

Made = tuple[ReduceLROnPlateau, torch.optim.Optimizer]


class Plateau:
    """The rates of torch's ReduceLROnPlateau, which steps after each test.

    They act from the next step on, and are a function of the step and of what was measured before
    it, which is the same on every rank: a checkpoint keeps those numbers alone.
    """

    def __init__(
        self, make: Callable[[], Made], metric: str, warm_up: int = 0, plain: bool = False
    ) -> None:
        """`make` gives a new scheduler and the optimizer whose groups it moves.

        `warm_up` steps rise to the rate; `plain`: there is one group, and a rate is a number.
        """
        self._make, self.metric, self._warm_up, self._plain = make, metric, warm_up, plain
        self._begin()

    def _begin(self) -> None:
        self._scheduler, self._optimizer = self._make()
        self._tests: list[tuple[int, float]] = []
        """The steps of tests, and what was measured."""
        self._levels = [(0, self._rates())]
        """From which step on there are which rates."""

    def _rates(self) -> GroupRates:
        return GroupRates(float(group["lr"]) for group in self._optimizer.param_groups)

    def __call__(self, step: int) -> float:
        """The learning rate of a step, or those of groups."""
        rates = next(rates for start, rates in reversed(self._levels) if start <= step)
        if step < self._warm_up:
            rates = rates * ((step + 1) / self._warm_up)
        return float(rates) if self._plain else rates

    def take(self, results: Mapping[str, float], step: int) -> None:
        """Count a test after `step` steps, which gave these results."""
        value = results[self.metric]
        self._tests.append((step, value))
        self._scheduler.step(value)
        if (rates := self._rates()).rates != self._levels[-1][1].rates:
            self._levels.append((step, rates))

    def state(self) -> State:
        """Numbers that JSON has; None is no number, and infinities are texts."""
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


def plateau_maker(
    groups: Callable[[], torch.optim.Optimizer], arguments: Mapping[str, Any], metric: str
) -> Callable[[], Made]:
    """Makes torch's scheduler from settings; ValueError for what it does not take."""
    usual = {"mode": MODES[metric]} if metric in MODES else {}
    check_mode("schedule.metric", metric, arguments.get("mode"), "schedule.arguments.mode")

    def make() -> Made:
        optimizer = groups()
        try:
            return ReduceLROnPlateau(optimizer, **{**usual, **arguments}), optimizer
        except Exception as error:
            raise ValueError(
                f"schedule.arguments is {dict(arguments)} of ReduceLROnPlateau, but torch says: "
                f"{one_line(error)}; change it"
            ) from None

    return make
