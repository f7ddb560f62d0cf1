"""Measured and predicted speeds of methods, and descriptions of cut networks."""
