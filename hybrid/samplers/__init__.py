"""The registry of samplers."""
