"""The largest numbers that settings may have."""

MANY, LARGE = 10**9, 1e15
"""The most that may be asked of a count, and of a real number: beyond, arithmetic overflows."""
