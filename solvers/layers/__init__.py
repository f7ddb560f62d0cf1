"""Layers that methods need: projections, factorizations, reversible units, auxiliary networks."""
