"""A block, and what its steps are made of."""
