"""Predictions of the fastest method on a cluster, from the measured time of every unit."""
