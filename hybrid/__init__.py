"""Layer-parallel training of residual networks with auxiliary variables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid import data, models
    from hybrid.cuts.partition import Blocks, split
    from hybrid.training.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Blocks", "Trainer", "data", "models", "split"]

_HOMES = {
    "Blocks": "hybrid.cuts.partition",
    "split": "hybrid.cuts.partition",
    "Trainer": "hybrid.training.trainer",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the command must hear signals before torch is there."""
    if name not in __all__:
        raise AttributeError(f"module 'hybrid' has no attribute {name!r}")
    home = import_module(_HOMES.get(name, f"hybrid.{name}"))
    return getattr(home, name) if name in _HOMES else home
