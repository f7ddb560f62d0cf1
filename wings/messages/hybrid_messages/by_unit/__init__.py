"""Passes that go through a block unit by unit, and the steps of units."""
