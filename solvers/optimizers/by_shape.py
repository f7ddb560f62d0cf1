"""Optimizers with a rule of their own for matrices, and one of torch's for what is none."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

Group = dict[str, Any]
_TORCHS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class ByShape(torch.optim.Optimizer):
    """Steps matrices and filters, outputs x all other dimensions, by the rule that it is named for.

    A group with "rule": "sgd" or "adamw" is stepped by torch's own, with the group's settings, bit
    for bit. Any other group holds no vectors (ValueError).
    """

    name: ClassVar[str]
    """The name of the rule, as a group has it."""

    def __init__(self, params: Iterable[Tensor] | Iterable[Group], settings: Group) -> None:
        super().__init__(params, {"rule": self.name, **settings})

    def add_param_group(self, param_group: Group) -> None:
        cls = _TORCHS.get(param_group.get("rule", self.name))
        if cls is not None:
            torchs = cls([torch.zeros(1)]).defaults
            settings = self.defaults
            if "betas" in settings:  # beta_1 is a momentum, too
                b1 = settings["betas"][0]
                settings = {"momentum": b1, "nesterov": b1 > 0, **settings}
            same = {k: v for k, v in settings.items() if k in ("momentum", "nesterov", "betas")}
            for key, value in {**torchs, **same}.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        vectors = [tuple(p.shape) for p in group["params"] if p.ndim < 2]
        if group["rule"] == self.name and vectors:
            raise ValueError(
                f"{type(self).__name__} steps matrices, and was given a parameter of shape "
                f'{vectors[0]}: put it into a group with "rule": "sgd" or "adamw"'
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = [group for group in self.param_groups if group["rule"] == self.name]
        self.step_matrices([(p, g) for g in groups for p in g["params"] if p.grad is not None])
        for rule, cls in _TORCHS.items():
            if groups := [group for group in self.param_groups if group["rule"] == rule]:
                # torch's optimizer over these groups, whose state is kept here
                of_torch: torch.optim.Optimizer = object.__new__(cls)
                plain = {"differentiable": False}
                vars(of_torch).update(vars(self), param_groups=groups, defaults=plain)
                of_torch.step()

    @abstractmethod
    def step_matrices(self, matrices: list[tuple[Tensor, Group]]) -> None:
        """Step these, all of which have a gradient, each by the settings of its group."""
