"""An optimizer of the user's over the whole network, of which each block takes its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.errors import one_line
from hybrid.networks.blocks import Blocks
from hybrid.settings import torch_classes
from hybrid.solvers.numerics.optimizer_state import clone_optimizer, over

Group = dict[str, Any]


@dataclass(frozen=True)
class GivenOptimizer:
    """Its groups by the names of their parameters: replicas have copies of the network.

    The object itself is never stepped or changed.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Group]
    """The settings of each, with its own learning rate and its place in "lr_index"."""
    names: Sequence[Sequence[str]]
    """Of the parameters of each."""

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, blocks: Blocks, scheduled: bool
    ) -> GivenOptimizer:
        """`scheduled`: whether the schedule is an object, which may have set the rates already.

        ValueError, on one line, for an optimizer that is not one of the network's parameters, that
        has made steps, or whose step blocks cannot make.
        """
        _check_class(optimizer)
        _check_parameters(optimizer, blocks.model)
        name = type(optimizer).__name__
        if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
            raise ValueError(
                f"the optimizer, {name}, has made steps, and its state would be left out: make a "
                "new one (a run goes on with the state of its optimizer by resume=True)"
            )
        if not scheduled and any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f"a scheduler was made on the optimizer, {name}, and schedule= is another: give it "
                'that scheduler, as schedule=(scheduler, "step"), or an optimizer without one'
            )
        rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        check_rates(name, rates)
        used = {name for unit in blocks.units for name in unit.parameters()}
        known: dict[int, list[str]] = {}  # a weight may have several names, on several blocks
        for n, p in blocks.model.named_parameters(remove_duplicate=False):
            if n in used:
                known.setdefault(id(p), []).append(n)
        kept = ("params", "param_names", "initial_lr")
        groups = [
            {**{k: v for k, v in group.items() if k not in kept}, "lr": _copied(rate)}
            | {"lr_ratio": float(rate) / float(rates[0]), "lr_index": index}
            for index, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True))
        ]
        # a parameter that the forward pass does not use is in no unit, and has no gradient
        names = [
            [n for p in group["params"] for n in known.get(id(p), ())]
            for group in optimizer.param_groups
        ]
        return cls(optimizer, groups, names)

    @property
    def rates(self) -> list[float]:
        """The groups' own learning rates; the first is the peak of the schedule."""
        return [float(group["lr"]) for group in self.groups]

    def part(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """One of the same class over these parameters, by name, of the groups that have any.

        ValueError if it cannot be made.
        """
        chosen = [
            [*dict.fromkeys(parameters[n] for n in names if n in parameters)]
            for names in self.names
        ]
        pairs = [*zip(self.groups, chosen, strict=True)]
        groups = [{**group, "params": params} for group, params in pairs if params]
        # an optimizer needs a parameter, and a block may have none
        spare = [{**self.groups[0], "params": [nn.Parameter(torch.zeros(0, 0))]}]
        return clone_optimizer(self.optimizer, groups or spare)

    def stand_in(self, as_is: bool = False) -> torch.optim.Optimizer:
        """One with its groups and no parameters, for a scheduler to move.

        `as_is`: with what a scheduler that was made on it has left there.
        """
        groups = self.optimizer.param_groups if as_is else self.groups
        return stand_in(self.optimizer, groups)


def stand_in(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer with copies of groups without their parameters, whose step does nothing."""

    def step() -> None:
        """What schedulers would wrap, and warn of if it had not been called."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    copies = [{key: _copied(value) for key, value in group.items()} for group in groups]
    another = over([{**group, "params": []} for group in copies], optimizer)
    vars(another).update(state={}, step=step, _opt_called=True)
    return another


def _copied(value: Any) -> Any:
    """A learning rate that is a tensor is changed in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _check_class(optimizer: torch.optim.Optimizer) -> None:
    """ValueError for one that needs what blocks do not have."""
    kind = type(optimizer)
    if torch_classes.needs_closure(kind) or issubclass(kind, torch.optim.SparseAdam):
        raise ValueError(
            f"the optimizer is {kind.__name__}, but blocks have no closure that evaluates the "
            "loss, and no sparse gradients: take one whose step needs neither"
        )
    try:
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "param_names"}
        clone_optimizer(optimizer, [{**group, "params": [nn.Parameter(torch.zeros(1, 1))]}])
    except ValueError as error:
        raise ValueError(f"the optimizer cannot be divided: {one_line(error)}") from None


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """ValueError unless it steps all that is trained of the network, and nothing else."""
    name = type(optimizer).__name__
    own = {id(p): n for n, p in model.named_parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in stepped if id(p) not in own]
    if foreign:
        raise ValueError(
            f"the optimizer, {name}, has {len(foreign)} parameters that are not the model's, the "
            f"first of shape {foreign[0]}: make it over the parameters of the model that was split"
        )
    there = {id(p) for p in stepped}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in there]
    if missing:
        raise ValueError(
            f"the optimizer, {name}, lacks {len(missing)} parameters of the model that require "
            f"gradients, the first {missing[0]}: add them, or freeze them by requires_grad_(False)"
        )


def check_rates(name: str, rates: Sequence[Any]) -> None:
    """ValueError unless the learning rates of an optimizer's groups are numbers that can be."""
    if any(not isinstance(rate, float | int | torch.Tensor) for rate in rates) or not rates[0]:
        raise ValueError(
            f"the groups of {name} have the learning rates {', '.join(map(str, rates))}: give each "
            "a number, which the schedule multiplies, and the first a positive one"
        )
