"""Local work in ticks in which a rank would wait: how much of it fits, its timing, its records."""
