"""Random operations that give the same numbers in every pass, however it is divided."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.numerics.draws import DispatchMode, drops_nothing

GOLDEN = 0.6180339887498949
"""Its multiples modulo 1 are spread evenly."""


NUMBERS = {"p", "mean", "std", "from", "to", "lambd"}
"""Arguments whose defaults count."""


class UnknownDrawError(ValueError):
    """An operation draws random numbers in a way that is not known here."""


class ConstantDraws(DispatchMode):
    """Within it what a row gets at random depends on its last dimension alone.

        u_j = (1/2 + j g) mod 1   for place j of the last dimension; 1/2 where there is but one

    Uniform numbers are u, normal ones their quantiles, a Bernoulli variable is 1 where u < p, and
    so on. A pass over all rows at once and passes over parts of them then compute the same.
    """

    def __init__(self, keyed: bool = False) -> None:
        """`keyed`: what is drawn in a backward pass has to come from a generator, or is refused."""
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
        known = func._schema.arguments
        given = {a.name: a.default_value for a in known if a.name in NUMBERS}
        given |= {**dict(zip((a.name for a in known), args, strict=False)), **kwargs}
        return _draw(func.overloadpacket.__name__, given, func._schema.is_mutable)


def _draw(name: str, given: dict[str, Any], in_place: bool) -> Any:
    """What an operation of that name gives for arguments by their names."""
    x: Any = given.get("self", given.get("input"))
    high = given.get("high", given.get("to"))
    if name == "native_dropout":
        if given.get("train") is False or not given["p"]:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        kept = _uniform(x) < 1 - given["p"]
        return x * kept / max(1e-9, 1 - given["p"]), kept
    if name == "randperm":
        return torch.arange(given["n"], device=given.get("device"))
    if name == "multinomial":
        order = torch.sort(x, dim=-1, descending=True, stable=True).indices
        return order[..., : given["num_samples"]]
    if name == "randint":
        given["dtype"] = given.get("dtype") or torch.int64
    like = _result(given, in_place)
    u = _uniform(like)
    if name.startswith("bernoulli"):
        values = u < given.get("p", x)
    elif name.startswith(("randint", "random")):
        low = given.get("low", given.get("from")) or 0
        values = (low + u * ((1 << 24 if high is None else high) - low)).floor()
    elif name in ("rand", "rand_like"):
        values = u
    elif name.startswith("uniform"):
        values = given.get("from", 0.0) + u * (given.get("to", 1.0) - given.get("from", 0.0))
    elif name.startswith(("normal", "randn")):
        values = given.get("mean", 0.0) + given.get("std", 1.0) * sqrt(2) * (2 * u - 1).erfinv()
    elif name.startswith("exponential"):
        values = -(1 - u).log() / given.get("lambd", 1.0)
    else:
        raise UnknownDrawError(f"{name} draws random numbers")
    return like.copy_(values)


def _result(given: Mapping[str, Any], in_place: bool) -> Tensor:
    """What is written to in place, or memory for what is drawn."""
    size, out = given.get("size"), given.get("out")
    if size is not None and out is None:
        return torch.empty(size, dtype=given.get("dtype"), device=given.get("device"))
    x: Tensor = next(each for each in (out, *given.values()) if isinstance(each, Tensor))
    return x if in_place else torch.empty_like(x, dtype=given.get("dtype"))


def _uniform(like: Tensor) -> Tensor:
    """u, of the shape of a tensor, in float64."""
    if like.dim() < 2:
        return torch.full(like.shape, 0.5, dtype=torch.float64, device=like.device)
    places = torch.arange(like.shape[-1], dtype=torch.float64, device=like.device)
    return ((0.5 + GOLDEN * places) % 1).expand(like.shape)
