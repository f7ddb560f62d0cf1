"""A user's optimizer over the whole network, divided among the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from hybrid.networks.blocks import Blocks
from hybrid.solvers.numerics.optimizer_state import clone_optimizer, with_groups

Group = dict[str, Any]
_APART = "params", "param_names", "initial_lr"


@dataclass(frozen=True)
class UserOptimizer:
    """A user's optimizer, with parameters by name: replicas have copies of the network.

    The object itself is never stepped or changed.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Group]
    """The settings of each group, with its learning rate and its index in "lr_index"."""
    names: Sequence[Sequence[str]]
    """The parameter names of each group."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, blocks: Blocks, scheduled: bool) -> UserOptimizer:
        """Read the groups; `scheduled`: a scheduler object may have set the rates already.

        ValueError for an optimizer that is not over the network's parameters, has made steps, or
        has a step that blocks cannot make.
        """
        name = type(optimizer).__name__
        check_class(optimizer, f"the optimizer is {name}")
        _check_parameters(optimizer, blocks.model)
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
        names_of: dict[int, list[str]] = {}  # a weight may have several names and blocks
        for n, p in blocks.model.named_parameters(remove_duplicate=False):
            if n in used:
                names_of.setdefault(id(p), []).append(n)
        groups = [
            {
                **{k: value for k, value in group.items() if k not in _APART},
                "lr": rate,
                "lr_ratio": float(rate) / float(rates[0]),
                "lr_index": i,
            }
            for i, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True))
        ]
        # a parameter that the forward pass does not use is in no unit, and has no gradient
        names = [
            [n for p in group["params"] for n in names_of.get(id(p), ())]
            for group in optimizer.param_groups
        ]
        return cls(optimizer, groups, names)

    @property
    def rates(self) -> list[float]:
        """The groups' learning rates; the first is the peak of the schedule."""
        return [float(group["lr"]) for group in self.groups]

    def part(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer of the same class over a block's parameters, given by name.

        ValueError if it cannot be made.
        """
        groups = []
        for group, names in zip(self.groups, self.names, strict=True):
            params = [*dict.fromkeys(parameters[n] for n in names if n in parameters)]
            groups += [{**_copied(group), "params": params}] if params else []
        # an optimizer needs a parameter, and a block may have none
        spare = [{**_copied(self.groups[0]), "params": [nn.Parameter(torch.zeros(0, 0))]}]
        return clone_optimizer(self.optimizer, groups or spare)


def stand_in(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    """Make an optimizer with copies of groups, without parameters, for a scheduler to move."""

    def step() -> None:
        """Do nothing; schedulers wrap `step`, and warn if it was not called."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    copy = with_groups([{**_copied(group), "params": []} for group in groups], optimizer)
    vars(copy).update(state={}, step=step, _opt_called=True)
    return copy


def _copied(group: Mapping[str, Any]) -> Group:
    """Copy a group with its learning rate, which may be a tensor that changes in place."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}


def check_class(optimizer: torch.optim.Optimizer, source: str) -> None:
    """Reject an optimizer that needs a closure or sparse gradients."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    needed = closure is not None and closure.default is Parameter.empty
    if needed or isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{source}, but blocks have no closure that evaluates the loss, and no sparse "
            "gradients: take one whose step needs neither"
        )


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Reject an optimizer that does not step exactly the network's trained parameters."""
    name, trained = type(optimizer).__name__, {id(p) for p in model.parameters()}
    stepped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    foreign = [tuple(p.shape) for key, p in stepped.items() if key not in trained]
    if foreign:
        raise ValueError(
            f"the optimizer, {name}, has {len(foreign)} parameters that are not the model's, the "
            f"first of shape {foreign[0]}: make it over the parameters of the model that was split"
        )
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    if missing:
        raise ValueError(
            f"the optimizer, {name}, lacks {len(missing)} parameters of the model that require "
            f"gradients, the first {missing[0]}: add them, or freeze them by requires_grad_(False)"
        )


def check_rates(name: str, rates: Sequence[Any]) -> None:
    """Reject learning rates of groups that are not numbers, or a first one of 0."""
    if any(not isinstance(rate, float | int | torch.Tensor) for rate in rates) or not rates[0]:
        raise ValueError(
            f"the groups of {name} have the learning rates {', '.join(map(str, rates))}: give each "
            "a number, which the schedule multiplies, and the first a positive one"
        )
