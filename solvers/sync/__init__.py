"""How replicas keep together: one file a strategy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybrid.solvers.registry import STRATEGIES

if TYPE_CHECKING:
    from hybrid.solvers.peers import Peers, Sync
    from hybrid.solvers.sync.all_reduce import AllReduce
    from hybrid.solvers.sync.base import Strategy
    from hybrid.solvers.sync.diloco import DiLoCo
    from hybrid.solvers.sync.hpsgd import HPSGD
    from hybrid.solvers.sync.local_sgd import LocalSGD

__all__ = ["HPSGD", "AllReduce", "DiLoCo", "LocalSGD", "Peers", "Strategy", "Sync"]

_HOMES = {
    "Strategy": "hybrid.solvers.sync.base",
    **dict.fromkeys(("Peers", "Sync"), "hybrid.solvers.peers"),
    **{place.partition(":")[2]: place.partition(":")[0] for place in STRATEGIES.places.values()},
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then, as `solvers` does."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
