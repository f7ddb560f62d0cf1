"""The report of a run: one HTML page of tables, curves and, for factorised models, the factors."""

from hybrid.report.run import compare, write

__all__ = ["compare", "write"]
