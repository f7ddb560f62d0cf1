"""Layer-parallel training of residual networks with auxiliary variables."""

from hybrid import data, models
from hybrid.partition import Blocks, split
from hybrid.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Blocks", "Trainer", "data", "models", "split"]
