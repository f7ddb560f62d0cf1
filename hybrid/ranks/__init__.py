"""Which process this is, how it was started, and how it is told to stop."""
