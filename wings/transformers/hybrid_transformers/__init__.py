"""transformers' Trainer, whose model trains in blocks."""

from hybrid.errors import OWN
from hybrid.solvers.numerics.attributes import LIBRARIES
from hybrid_transformers.block_trainer import BlockTrainer

OWN.add(__name__)
LIBRARIES.add(__name__)

__all__ = ["BlockTrainer"]
