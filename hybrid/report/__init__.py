"""The report of a run: one HTML page of tables, curves and, for factorised models, the factors."""

from hybrid.report.run import write

__all__ = ["write"]
