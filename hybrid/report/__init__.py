"""The report of a run: one HTML page of tables, curves and, for factorized models, the factors."""

from hybrid.report.single import compare, write

__all__ = ["compare", "write"]
