"""Layer-parallel training of residual networks with auxiliary variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid import data, models
    from hybrid.partition import Blocks, split
    from hybrid.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Blocks", "Trainer", "data", "models", "split"]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the command must hear signals before torch is there."""
    if name not in __all__:
        raise AttributeError(f"module 'hybrid' has no attribute {name!r}")
    import hybrid.data
    import hybrid.models
    import hybrid.partition
    import hybrid.trainer

    homes = {"Trainer": hybrid.trainer, "Blocks": hybrid.partition, "split": hybrid.partition}
    return getattr(homes[name], name) if name in homes else getattr(hybrid, name)
