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

_SECTIONS = ("Checkpoint", "Link", "Optimizer", "Round", "Schedule", "Train")
_HOMES = {
    "Blocks": "hybrid.networks.blocks",
    "Callback": "hybrid.training.callbacks",
    "load": "hybrid.training.restore",
    "split": "hybrid.networks.partition",
    **dict.fromkeys((f"{name}Settings" for name in _SECTIONS), "hybrid.settings.config"),
}
_MODULES = {"data": "hybrid.data", "models": "hybrid.networks.models"}
__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the command must hear signals before torch is there."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hybrid' has no attribute {name!r}")
