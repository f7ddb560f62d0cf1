"""The run folder: what a run writes, and the checks of what it reads."""
