"""Layers that methods need: projections, factorisations, reversible units, heads."""
