"""Random operations that give the same numbers in every pass, whatever its batch division."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.numerics.draws import DispatchMode, drops_nothing

GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly."""


NUMBERS = {"p", "mean", "std", "from", "to", "lambd"}
"""Arguments that take their defaults from the schema."""


class UnknownDrawError(ValueError):
    """A random operation has no constant replacement here."""


class ConstantDraws(DispatchMode):
    """Replaces random numbers by constants that depend only on the place in the last dimension.

        u_j = (1/2 + j g) mod 1   at place j of the last dimension; 1/2 for a single dimension

    Uniform numbers become u, normal ones their quantiles, a Bernoulli variable is 1 where u < p,
    and so on. So a pass over all rows equals passes over parts of them.
    """

    def __init__(self, keyed: bool = False) -> None:
        """`keyed`: refuse draws in a backward pass that do not come from a generator."""
        super().__init__()
        self.keyed = keyed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if not seeded or drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        in_backward = torch._C._current_graph_task_id() >= 0
        if self.keyed and in_backward and kwargs.get("generator") is None:
            raise ValueError(
                f"{func.overloadpacket.__name__} draws random numbers in a backward pass "
                "(torch.utils.checkpoint), which would be others than before: leave that out, and "
                "choose a method that recomputes (correction.recompute)"
            )
        parameters = func._schema.arguments
        arguments = {a.name: a.default_value for a in parameters if a.name in NUMBERS}
        arguments |= {**dict(zip((a.name for a in parameters), args, strict=False)), **kwargs}
        return _draw(func.overloadpacket.__name__, arguments, func._schema.is_mutable)


def _draw(name: str, arguments: dict[str, Any], in_place: bool) -> Any:
    """Compute the constant result of a random operation from its arguments by name."""
    x: Any = arguments.get("self", arguments.get("input"))
    high = arguments.get("high", arguments.get("to"))
    if name == "native_dropout":
        if arguments.get("train") is False or not arguments["p"]:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = _uniform(x) < 1 - arguments["p"]
        return x * mask / max(1e-9, 1 - arguments["p"]), mask
    if name == "randperm":
        return torch.arange(arguments["n"], device=arguments.get("device"))
    if name == "multinomial":
        order = torch.sort(x, dim=-1, descending=True, stable=True).indices
        return order[..., : arguments["num_samples"]]
    if name == "randint":
        arguments["dtype"] = arguments.get("dtype") or torch.int64
    like = _result(arguments, in_place)
    u = _uniform(like)
    if name.startswith("bernoulli"):
        values = u < arguments.get("p", x)
    elif name.startswith(("randint", "random")):
        low = arguments.get("low", arguments.get("from")) or 0
        values = (low + u * ((1 << 24 if high is None else high) - low)).floor()
    elif name in ("rand", "rand_like"):
        values = u
    elif name.startswith("uniform"):
        low = arguments.get("from", 0.0)
        values = low + u * (arguments.get("to", 1.0) - low)
    elif name.startswith(("normal", "randn")):
        mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
        values = mean + std * sqrt(2) * (2 * u - 1).erfinv()
    elif name.startswith("exponential"):
        values = -(1 - u).log() / arguments.get("lambd", 1.0)
    else:
        raise UnknownDrawError(f"{name} draws random numbers")
    return like.copy_(values)


def _result(arguments: Mapping[str, Any], in_place: bool) -> Tensor:
    """Return the tensor of an in-place operation, or allocate the result."""
    size, out = arguments.get("size"), arguments.get("out")
    if size is not None and out is None:
        return torch.empty(size, dtype=arguments.get("dtype"), device=arguments.get("device"))
    x: Tensor = next(each for each in (out, *arguments.values()) if isinstance(each, Tensor))
    return x if in_place else torch.empty_like(x, dtype=arguments.get("dtype"))


def _uniform(like: Tensor) -> Tensor:
    """Compute u, of the shape of a tensor, in float64."""
    if like.dim() < 2:
        return torch.full(like.shape, 0.5, dtype=torch.float64, device=like.device)
    places = torch.arange(like.shape[-1], dtype=torch.float64, device=like.device)
    return ((0.5 + GOLDEN * places) % 1).expand(like.shape)
