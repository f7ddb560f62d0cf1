"""Calls of a user's own code, whose errors say on which values it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

FAULTS = (
    *(RuntimeError, TypeError, ValueError, AttributeError),
    *(LookupError, ArithmeticError, AssertionError, OSError),
)
"""What a user's code raises by mistake; torch uses some other exceptions to leave a forward."""


def call_user_code(what: str, function: Callable[[Any, Any], Any], out: Any, targets: Any) -> Any:
    """The value of a loss or a metric; ValueError with the shapes of its arguments if it fails."""
    try:
        return function(out, targets)
    except FAULTS as error:
        raise ValueError(
            f"{what} fails on output {described(out)} and targets {described(targets)}: "
            f"{failure(error)}{_remedy(out)}"
        ) from error


def _remedy(out: Any) -> str:
    """For an output that holds its logits by name, as Hugging Face's models give it."""
    if not ("logits" in out if isinstance(out, Mapping) else hasattr(out, "logits")):
        return ""
    return "; put a module around the network whose forward returns self.model(inputs).logits"


def described(value: Any) -> str:
    """The shapes and types of tensors, and the classes of what is none, for an error message."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if any(leaf is value for leaf in tree_leaves(value)):
        return type(value).__name__
    return str(tree_map(described, value))


def failure(error: Exception) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason'])[0]}"


def detached(out: Any) -> Any:
    """An output without its graph."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
