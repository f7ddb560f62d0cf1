"""The exponential moving average of a block's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average(torch.optim.Optimizer):
    """a <- ema a + (1 - ema) w after every step of the weights w; a = w after the first.

    It has the form of an optimizer whose `step` is that update, so that checkpoints store a like an
    optimizer's state. It equals torch's AveragedModel, without a second model.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], ema: float) -> None:
        super().__init__(params, {"ema": ema})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            begun = [p for p in group["params"] if self.state[p]]
            averages = [self.state[p]["average"] for p in begun]
            if begun:
                get_ema_multi_avg_fn(group["ema"])(averages, begun, 0)
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["average"] = p.detach().clone()

    def swap(self) -> None:
        """Exchange weights and averages in place, for all weights that have an average."""
        for p, state in self.state.items():
            if state:
                # .data: no graph needs the weights before they are exchanged again
                weights = p.data.clone()
                p.data.copy_(state["average"])
                state["average"].copy_(weights)
