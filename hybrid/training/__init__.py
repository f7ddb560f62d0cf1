"""A training from its first step to its last, on every rank."""
