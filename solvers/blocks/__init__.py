"""A block, and the parts of its steps."""
