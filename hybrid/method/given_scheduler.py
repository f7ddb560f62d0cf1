"""A scheduler of torch's as its user has it, run ahead: its rates by step or by epoch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.optim.lr_scheduler import LRScheduler

from hybrid.errors import one_line
from hybrid.method.given_optimizer import GivenOptimizer, stand_in
from hybrid.settings import torch_classes
from hybrid.solvers.numerics.group_rates import GroupRates, momentum

Groups = GivenOptimizer | torch.optim.Optimizer
"""What has the parameter groups whose rates are scheduled: the user's optimizer, or a block's."""
STEPS = ("step", "epoch")


@dataclass(frozen=True)
class GivenScheduler:
    """A scheduler that was made on the user's optimizer, or a function that makes one.

    The object itself is never stepped or changed: a copy moves an optimizer without parameters.
    """

    source: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]
    when: str | None = None
    """step or epoch, when it steps; of ReduceLROnPlateau, the metric that it follows."""

    @classmethod
    def of(cls, value: Any) -> GivenScheduler | None:
        """What is given as an object, a function `optimizer` -> scheduler, or either and when.

        None for anything else, ValueError for a pair that is none.
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

    def on(self, groups: Groups) -> tuple[LRScheduler, torch.optim.Optimizer]:
        """A scheduler like it, and the optimizer without parameters whose groups it moves."""
        given = groups if isinstance(groups, GivenOptimizer) else None
        if isinstance(self.source, LRScheduler):
            self.check(given)
            assert given is not None
            optimizer = given.stand_in(as_is=True)
            return deepcopy(self.source, {id(given.optimizer): optimizer}), optimizer
        if isinstance(groups, GivenOptimizer):
            optimizer = groups.stand_in()
        else:
            optimizer = stand_in(groups, groups.param_groups)
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

    def check(self, given: GivenOptimizer | None) -> None:
        """ValueError unless an object was made on the optimizer that trains, and is new."""
        if not isinstance(self.source, LRScheduler):
            return
        name = type(self.source).__name__
        if given is None or self.source.optimizer is not given.optimizer:
            raise ValueError(
                f"schedule is a {name} on an optimizer that does not train here: give that as "
                "optimizer=, too, or a function that makes the scheduler from `optimizer`"
            )
        each = getattr(self.source, "_schedulers", [])  # of ChainedScheduler, which counts none
        done = max(getattr(one, "last_epoch", 0) for one in (self.source, *each))
        if done > 0:
            raise ValueError(
                f"schedule is a {name} that has made {done} steps: give a new one on a new "
                "optimizer"
            )

    def interval(self, scheduler: LRScheduler) -> str:
        """When it steps; ValueError if that is not said, and the class alone does not tell."""
        name = type(scheduler).__name__
        if self.when in STEPS:
            return str(self.when)
        if self.when is not None:
            raise ValueError(f"schedule has a {name} and {self.when!r}; choose 'step' or 'epoch'")
        if name not in torch_classes.BY_STEP:
            raise ValueError(
                f"schedule is a {name}, which may step after every mini-batch or epoch: say which, "
                "as schedule=(scheduler, 'step') or (scheduler, 'epoch')"
            )
        return "step"


class Rows(Sequence[float]):
    """The rates of groups, row by row, in 8 bytes each; a row is a `GroupRates`."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._rates, self._momenta = array("d"), array("d")
        self.moves = False
        """Whether momenta move, too."""

    def add(self, groups: Sequence[dict[str, Any]]) -> None:
        """One more row: what groups have."""
        self._rates.extend(float(group["lr"]) for group in groups)
        self._momenta.extend(map(momentum, groups))
        self.moves = self.moves or (self._momenta[-self._groups :] != self._momenta[: self._groups])

    def __len__(self) -> int:
        return len(self._rates) // self._groups

    @overload
    def __getitem__(self, row: int) -> GroupRates: ...
    @overload
    def __getitem__(self, row: slice) -> list[float]: ...
    def __getitem__(self, row: int | slice) -> GroupRates | list[float]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        part = slice(row * self._groups, (row + 1) * self._groups)
        return GroupRates(self._rates[part], self._momenta[part] if self.moves else ())


def run_ahead(scheduler: LRScheduler, optimizer: torch.optim.Optimizer, count: int) -> Rows:
    """What a scheduler gives the groups of its optimizer in its first `count` intervals.

    It may raise whatever the scheduler raises.
    """
    rows = Rows(len(optimizer.param_groups))
    for i in range(count):
        if i:
            scheduler.step()
        rows.add(optimizer.param_groups)
    return rows
