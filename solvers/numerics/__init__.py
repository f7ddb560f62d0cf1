"""What a block's passes and steps need beside torch: draws, buffers, clipping, optimizers."""
