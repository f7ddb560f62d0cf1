"""The report of a run: one HTML page of tables, curves and, for factorized models, the factors."""

from hybrid.report.single import command_of, compare, write

__all__ = ["command_of", "compare", "write"]
