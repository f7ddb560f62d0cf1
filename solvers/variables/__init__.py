"""Auxiliary variables on one rank: storage and sub-problems."""
