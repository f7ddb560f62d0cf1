"""Rounds over the windows of an epoch, of methods with and without a parallel phase."""
