"""Steps and backward passes that leave torch's compiler alone.

An optimizer of torch imports torch._dynamo when it is made and in its first step, to tell the
compiler to keep out, and a backward pass from a given adjoint imports the compiler's symbolic
shapes and with them sympy: 0.8 seconds, 75 MB and 900 modules on every rank, and nothing is
compiled. Whoever imports the compiler, as torch.compile does, has torch's own ways from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

COMPILER = "torch._dynamo"
_CACHE = "__dynamo_disable"
"""Where what torch._disable_dynamo decorates keeps what it calls, after its first call."""


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.p = p
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.p, None


def paired(x: Tensor, p: Tensor) -> Tensor:
    """Zero, with the gradient p with respect to x.

    Its backward pass is that of x from p.
    """
    end: Tensor = _Paired.apply(x, p)  # type: ignore[no-untyped-call]
    return end


def leave_compiler_out() -> None:
    """Let torch's optimizers work without an import of the compiler."""
    if COMPILER in sys.modules:
        return
    base = torch.optim.Optimizer
    for decorated in (base.add_param_group, base.zero_grad, base.state_dict, base.load_state_dict):
        if hasattr(decorated, "__wrapped__"):
            _preset(decorated)
    for kind in vars(torch.optim).values():
        step: Any = vars(kind).get("step") if isinstance(kind, type) else None
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            kind.step = _without_graph_breaks(step)


def _preset(decorated: Any) -> None:
    """Preset what a function calls that torch._disable_dynamo has decorated."""
    plain = decorated.__wrapped__

    def run(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        vars(plain).pop(_CACHE, None)
        return decorated(*args, **kwargs)

    vars(plain).setdefault(_CACHE, run)


def _without_graph_breaks(step: Any) -> Callable[..., Any]:
    """An optimizer's step without the marks for the compiler around it."""
    plain = step.__wrapped__

    @wraps(plain)
    def run(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return run


leave_compiler_out()
