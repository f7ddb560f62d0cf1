"""Rounds over the windows of an epoch, with and without a parallel phase."""
