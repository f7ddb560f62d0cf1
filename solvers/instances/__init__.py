"""Instances with paths of their own: their schedule, and the units that they contribute to."""
