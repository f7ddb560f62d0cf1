"""Helpers of a block's passes and steps: draws, buffers, clipping, optimizer state."""
