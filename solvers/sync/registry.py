"""The strategies by name: one file each, a line here; a strategy is imported when asked for."""

from __future__ import annotations

from typing import Any

from solvers.named import Named

STRATEGIES: Named[Any] = Named(
    "strategy",
    {
        "all-reduce": "solvers.sync.all_reduce:AllReduce",
        "local-sgd": "solvers.sync.local_sgd:LocalSGD",
        "diloco": "solvers.sync.diloco:DiLoCo",
        "hpsgd": "solvers.sync.hpsgd:HPSGD",
    },
    default="all-reduce",
    group="hybrid.sync",
    base="solvers.sync.base:Strategy",
)
"""Name -> where its class is."""
