"""The learning rates of several parameter groups at one step, passed on as one number."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GroupRates(float):
    """The learning rate of each parameter group and, if the schedule moves it, the momentum.

    As a number it is the first group's rate, and a factor multiplies all rates. "lr_index" of an
    optimizer's group is its index here.
    """

    rates: tuple[float, ...]
    momenta: tuple[float, ...]
    """Empty: the schedule does not move momenta."""

    def __new__(cls, rates: Iterable[float], momenta: Iterable[float] = ()) -> "GroupRates":
        rates = tuple(rates)
        group_rates = super().__new__(cls, rates[0])
        group_rates.rates, group_rates.momenta = rates, tuple(momenta)
        return group_rates

    def __mul__(self, factor: float) -> "GroupRates":
        return GroupRates((rate * factor for rate in self.rates), self.momenta)

    __rmul__ = __mul__

    def __getnewargs__(self) -> Any:
        return self.rates, self.momenta


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a parameter group's learning rate and momentum, or its ratio of a plain number."""
    index: int | None = group.get("lr_index")
    if isinstance(rate, GroupRates) and index is not None:
        value = rate.rates[index]
        if rate.momenta and not group.get("separate_momentum"):
            if "betas" in group:
                group["betas"] = (rate.momenta[index], *group["betas"][1:])
            else:
                group["momentum"] = rate.momenta[index]
    else:
        value = float(rate) * group.get("lr_ratio", 1.0)
    tensor = group.get("lr")  # torch allows a tensor as the learning rate
    group["lr"] = torch.full_like(tensor, value) if isinstance(tensor, Tensor) else value


def momentum(group: dict[str, Any]) -> float:
    """Return a group's momentum or first beta, which a torch scheduler may move; 0 without one."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def rate_to_tensor(rate: float) -> Tensor:
    """Convert a rate or group rates for a checkpoint: (), (1, groups) or (2, groups)."""
    if not isinstance(rate, GroupRates):
        return torch.tensor(rate, dtype=torch.float64)
    rows = [rate.rates, rate.momenta] if rate.momenta else [rate.rates]
    return torch.tensor(rows, dtype=torch.float64)


def rate_of_tensor(saved: Tensor) -> float:
    """Read a rate that `rate_to_tensor` wrote."""
    return GroupRates(*saved.tolist()) if saved.dim() else float(saved)
