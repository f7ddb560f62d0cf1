"""The strategies by name: one file each, a line here; a strategy is imported when asked for."""

from __future__ import annotations

from typing import Any

from hybrid.solvers.named import Named

STRATEGIES: Named[Any] = Named(
    "strategy",
    {
        "all-reduce": "hybrid.solvers.sync.all_reduce:AllReduce",
        "local-sgd": "hybrid.solvers.sync.local_sgd:LocalSGD",
        "diloco": "hybrid.solvers.sync.diloco:DiLoCo",
        "hpsgd": "hybrid.solvers.sync.hpsgd:HPSGD",
    },
    default="all-reduce",
    group="hybrid.sync",
    base="hybrid.solvers.sync.base:Strategy",
)
"""Name -> where its class is."""
