"""Layer-parallel training of residual networks with auxiliary variables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid import data
    from hybrid.errors import StoppedError
    from hybrid.networks import models
    from hybrid.networks.blocks import Blocks
    from hybrid.networks.partition import split
    from hybrid.settings.config import (
        CheckpointSettings,
        LinkSettings,
        OptimizerSettings,
        RoundSettings,
        ScheduleSettings,
        TrainSettings,
    )
    from hybrid.training.callbacks import Callback
    from hybrid.training.restore import load
    from hybrid.training.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "Callback",
    "CheckpointSettings",
    "LinkSettings",
    "OptimizerSettings",
    "RoundSettings",
    "ScheduleSettings",
    "StoppedError",
    "TrainSettings",
    "Trainer",
    "data",
    "load",
    "models",
    "split",
]

_HOMES = {
    "Blocks": "hybrid.networks.blocks",
    "split": "hybrid.networks.partition",
    "StoppedError": "hybrid.errors",
    "Trainer": "hybrid.training.trainer",
    "Callback": "hybrid.training.callbacks",
    "load": "hybrid.training.restore",
    **dict.fromkeys(
        (
            "CheckpointSettings",
            "LinkSettings",
            "OptimizerSettings",
            "RoundSettings",
            "ScheduleSettings",
            "TrainSettings",
        ),
        "hybrid.settings.config",
    ),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the command must hear signals before torch is there."""
    if name not in __all__:
        raise AttributeError(f"module 'hybrid' has no attribute {name!r}")
    if name == "models":
        return import_module("hybrid.networks.models")
    home = import_module(_HOMES.get(name, f"hybrid.{name}"))
    return getattr(home, name) if name in _HOMES else home
