"""Layers that methods need: branches to skip or invert, projections, bundles of tensors."""
