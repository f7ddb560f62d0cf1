"""Layer-parallel training of residual networks with auxiliary variables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid import data as data
    from hybrid.errors import StoppedError as StoppedError
    from hybrid.method.callback import Callback as Callback
    from hybrid.networks import models as models
    from hybrid.networks.blocks import Blocks as Blocks
    from hybrid.networks.local_init import without_weights as without_weights
    from hybrid.networks.partition.split import split as split
    from hybrid.report.summary import Summary as Summary
    from hybrid.settings.config import CheckpointSettings as CheckpointSettings
    from hybrid.settings.config import DelaySettings as DelaySettings
    from hybrid.settings.config import LinkSettings as LinkSettings
    from hybrid.settings.config import OptimizerSettings as OptimizerSettings
    from hybrid.settings.config import RoundSettings as RoundSettings
    from hybrid.settings.config import ScheduleSettings as ScheduleSettings
    from hybrid.settings.config import TrainSettings as TrainSettings
    from hybrid.training.callbacks.services import MLflowLogger as MLflowLogger
    from hybrid.training.callbacks.services import WandbLogger as WandbLogger
    from hybrid.training.restore import export as export
    from hybrid.training.restore import load as load
    from hybrid.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_SECTIONS = ("Checkpoint", "Delay", "Link", "Optimizer", "Round", "Schedule", "Train")
_HOMES = {
    "Blocks": "hybrid.networks.blocks",
    "Callback": "hybrid.method.callback",
    "MLflowLogger": "hybrid.training.callbacks.services",
    "StoppedError": "hybrid.errors",
    "Summary": "hybrid.report.summary",
    "Trainer": "hybrid.training.trainer",
    "WandbLogger": "hybrid.training.callbacks.services",
    "export": "hybrid.training.restore",
    "load": "hybrid.training.restore",
    "split": "hybrid.networks.partition.split",
    "without_weights": "hybrid.networks.local_init",
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


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
