"""Muon: orthogonalized momentum for matrices, a rule of torch's for what is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Rule = Literal["muon", "sgd", "adamw"]
Adjustment = Literal["original", "match_rms_adamw"]
_DTYPES = "bfloat16", "float32", "float64"
COEFFICIENTS = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7
_TORCHS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}


class Muon(torch.optim.Optimizer):
    r"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon), for the weights of a block.

        B <- mu B + (1 - mu) g                      g as a matrix, outputs x all other dimensions
        U <- NS((1 - mu) g + mu B)                  B itself without `nesterov`
        w <- (1 - lr wd) w - lr s U

    s is sqrt(max(1, outputs / others)) or, with `adjust_lr_fn` "match_rms_adamw", 0.2 times the
    root of the larger of the two. NS goes towards the nearest orthogonal matrix: X <- G / ||G||_F,
    then `ns_steps` times A = X X^T, X <- a X + (b A + c A A) X with (a, b, c) = `COEFFICIENTS`. It
    is computed in `ns_dtype`, by default in bfloat16 on a GPU and in the weights' format elsewhere.
    With `renormalize` w first gets the norm sqrt(outputs) again (Jordan, airbench, 2024), which
    suits filters before a BatchNorm, whose length has no effect but on the size of a step.

    Matrices are orthogonalized one by one: in a batch of several the bits of one could depend on
    what else its block holds, and so on where the network is cut.

    A group with "rule": "sgd" or "adamw" is stepped by torch's own, with the group's settings. A
    group of Muon's holds no vectors (ValueError). On matrices alone, and in bfloat16, this is
    `torch.optim.Muon`, bit for bit.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        rule: Rule = "muon",
        ns_steps: int = 5,
        ns_dtype: str | None = None,
        adjust_lr_fn: Adjustment = "original",
        renormalize: bool = False,
    ) -> None:
        if adjust_lr_fn not in get_args(Adjustment):
            known = ", ".join(get_args(Adjustment))
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; choose one of {known}")
        if ns_dtype not in (None, *_DTYPES):
            raise ValueError(f"ns_dtype is {ns_dtype!r}; choose one of {', '.join(_DTYPES)}")
        settings = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "rule": rule,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "renormalize": renormalize,
        }
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        cls = _TORCHS.get(param_group.get("rule", self.defaults["rule"]))
        if cls is not None:
            torchs = cls([torch.zeros(1)]).defaults
            own = {"momentum": self.defaults["momentum"], "nesterov": self.defaults["nesterov"]}
            for key, value in {**torchs, **own}.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        vectors = [tuple(p.shape) for p in group["params"] if p.ndim < 2]
        if group["rule"] == "muon" and vectors:
            raise ValueError(
                f"Muon orthogonalizes matrices, and was given a parameter of shape {vectors[0]}: "
                'put it into a group with "rule": "sgd" or "adamw"'
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["rule"] == "muon":
                for p in group["params"]:
                    if p.grad is not None:
                        self._step_matrix(p, p.grad, group)
        for rule, cls in _TORCHS.items():
            groups = [group for group in self.param_groups if group["rule"] == rule]
            if groups:
                # torch's optimizer over these groups, whose state is kept here
                of_torch: torch.optim.Optimizer = object.__new__(cls)
                plain = {"differentiable": False}
                vars(of_torch).update(vars(self), param_groups=groups, defaults=plain)
                of_torch.step()

    def _step_matrix(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, mu, lr = self.state[p], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - mu)
        moved = grad.lerp(momentum, mu) if group["nesterov"] else momentum
        update = orthogonalized(moved.flatten(1), group["ns_steps"], group["ns_dtype"])
        if group["renormalize"]:
            p.mul_(len(p) ** 0.5 / p.norm().clamp(min=SMALLEST_NORM))
        p.mul_(1 - lr * group["weight_decay"])
        rate = lr * _adjustment(group["adjust_lr_fn"], *update.shape)
        p.add_(update.view(p.shape), alpha=-rate)


def _adjustment(kind: Adjustment, rows: int, columns: int) -> float:
    """s of `Muon`, by torch's names."""
    if kind == "original":
        return sqrt(max(1, rows / columns))
    return 0.2 * sqrt(max(rows, columns))


def orthogonalized(matrix: Tensor, ns_steps: int, ns_dtype: str | None = None) -> Tensor:
    """NS of `Muon`: singular values between about 0.7 and 1.2, singular vectors as they are."""
    a, b, c = COEFFICIENTS
    if ns_dtype is None:
        dtype = torch.bfloat16 if matrix.is_cuda else matrix.dtype
    else:
        dtype = getattr(torch, ns_dtype)
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T.contiguous() if tall else x
