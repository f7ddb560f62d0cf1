"""The strategies by name: one file each, a line here."""

from solvers.checks import unknown
from solvers.sync.all_reduce import AllReduce
from solvers.sync.base import Strategy
from solvers.sync.diloco import DiLoCo
from solvers.sync.hpsgd import HPSGD
from solvers.sync.local_sgd import LocalSGD

DEFAULT = AllReduce.name

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (AllReduce, LocalSGD, DiLoCo, HPSGD)
}


def strategy_class(name: str) -> type[Strategy]:
    """The class of a strategy; ValueError names the nearest known name."""
    if name not in STRATEGIES:
        raise ValueError(unknown(name, STRATEGIES, "strategy"))
    return STRATEGIES[name]
