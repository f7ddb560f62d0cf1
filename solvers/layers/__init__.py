"""Layers that methods need: projections, reversible units, auxiliary networks."""
