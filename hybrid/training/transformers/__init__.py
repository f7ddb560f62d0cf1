"""transformers' Trainer, whose model trains in blocks."""

from hybrid.training.transformers.block_trainer import BlockTrainer as BlockTrainer
