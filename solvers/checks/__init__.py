"""Checks that the trained network is the user's: constant draws, passes by parts, means."""
