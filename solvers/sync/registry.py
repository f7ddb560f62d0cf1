"""The strategies by name: one file each, a line here; a strategy is imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from solvers.checks import unknown

if TYPE_CHECKING:
    from solvers.sync.base import Strategy

STRATEGIES = {
    "all-reduce": "solvers.sync.all_reduce:AllReduce",
    "local-sgd": "solvers.sync.local_sgd:LocalSGD",
    "diloco": "solvers.sync.diloco:DiLoCo",
    "hpsgd": "solvers.sync.hpsgd:HPSGD",
}
"""Name -> where its class is."""

DEFAULT = "all-reduce"


def strategy_class(name: str) -> type[Strategy]:
    """The class of a strategy; ValueError names the nearest known name."""
    if name not in STRATEGIES:
        raise ValueError(unknown(name, STRATEGIES, "strategy"))
    module, _, attribute = STRATEGIES[name].partition(":")
    found: type[Strategy] = getattr(import_module(module), attribute)
    return found
