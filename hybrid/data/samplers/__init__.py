"""Who chooses the samples of a mini-batch: one file a sampler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybrid.registries import SAMPLERS

if TYPE_CHECKING:
    from hybrid.data.samplers.auto_assist import AutoAssist
    from hybrid.data.samplers.base import Choice, Learning, Sampler
    from hybrid.data.samplers.selective_backprop import SelectiveBackprop
    from hybrid.data.samplers.uniform import Uniform

__all__ = [
    "SAMPLERS",
    "AutoAssist",
    "Choice",
    "Learning",
    "Sampler",
    "SelectiveBackprop",
    "Uniform",
]

_HOMES = {place.partition(":")[2]: place.partition(":")[0] for place in SAMPLERS.places.values()}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then, as `solvers` does."""
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module 'hybrid.data.samplers' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "hybrid.data.samplers.base")), name)
