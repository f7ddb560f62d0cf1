"""Layer-parallel training of residual networks with auxiliary variables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid import data, models
    from hybrid.partition import Blocks, split
    from hybrid.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Blocks", "Trainer", "data", "models", "split"]

_HOMES = {"Blocks": "hybrid.partition", "split": "hybrid.partition", "Trainer": "hybrid.trainer"}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the command must hear signals before torch is there."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"hybrid.{name}")
    raise AttributeError(f"module 'hybrid' has no attribute {name!r}")
