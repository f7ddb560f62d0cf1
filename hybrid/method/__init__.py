"""From settings, blocks and data to all that a run, a bench row and a plan row need."""
