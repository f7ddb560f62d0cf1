"""The report of a run: one HTML page of tables and curves."""

from hybrid.report.single import command_of, compare, write

__all__ = ["command_of", "compare", "write"]
