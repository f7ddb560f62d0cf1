"""What a step does about the delay of its gradient: optimizers around optimizers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.numerics.optimizer_state import clone_optimizer, with_groups


class Extrapolation(torch.optim.Optimizer):
    r"""Error feedback: an update u_t that comes late gives back what the one before it did wrong.

        w <- w + u_t + c (u_t - u_{t-1}),   c = min(cap, tau),   u_{-1} = 0

    u_t is what the inner optimizer adds to w, its weight decay included, and tau is the block's
    delay in steps. The corrections add up to c u_t: w is always c steps of u_t ahead of where the
    inner optimizer alone would be on the same gradients. With c = tau this is therefore weight
    prediction, forward and backward at w + tau u_{t-1} (SpecTrain, Chen et al., arXiv 1809.02839),
    in which the predicted weights are those that are tested; they are the same at the end of a
    schedule that ends at 0. With heavy-ball SGD at a constant rate and c = mu it is Nesterov's SGD.

    It keeps u_{t-1} as its state, and steps by its own groups, which at first are the inner one's.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        inner: torch.optim.Optimizer,
        ahead: float,
    ) -> None:
        """`ahead`: c. Over other groups than the inner optimizer's it takes a clone of that."""
        super().__init__(params, {})
        self.defaults = {"inner": inner, "ahead": ahead}
        is_same = params is inner.param_groups
        self.inner = inner if is_same else clone_optimizer(inner, self.param_groups)
        self.ahead = ahead

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        weights = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        before = [p.clone() for p in weights]
        with_groups(self.param_groups, self.inner).step()
        for p, w in zip(weights, before, strict=True):
            update, state = torch.sub(p, w, out=w), self.state[p]
            # the sum first: c (u_t - u_{t-1}) may be far below w's precision
            change = update if not state else update - state["update"]
            p.add_(change, alpha=self.ahead)
            state["update"] = update
