"""Cuts of a network into blocks of units, and the cost of units."""
