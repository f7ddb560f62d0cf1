"""The method of a run, a bench row or a plan row, made from settings, blocks and data."""
