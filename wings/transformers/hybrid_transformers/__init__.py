"""transformers' Trainer, whose model trains in blocks."""

from hybrid.errors import OWN
from hybrid_transformers.block_trainer import BlockTrainer

OWN.add(__name__)

__all__ = ["BlockTrainer"]
