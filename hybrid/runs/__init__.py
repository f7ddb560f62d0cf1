"""Settings into runs, and what reads a run folder again."""
