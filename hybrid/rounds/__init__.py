"""Rounds: what alternates and what trains alone, over the windows of an epoch."""
