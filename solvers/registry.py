"""The methods by name, of this and of other packages; a method is imported at its first use."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from solvers.checks import unknown

if TYPE_CHECKING:
    from solvers.base import Solver

OWN = {
    "backprop": "solvers.exact.backprop:Backprop",
    "penalty": "solvers.splitting.penalty:Penalty",
    "augmented-lagrangian": "solvers.splitting.augmented_lagrangian:AugmentedLagrangian",
    "block-admm": "solvers.splitting.block_admm:BlockADMM",
    "auxnet": "solvers.splitting.auxnet:AuxNet",
    "ddg": "solvers.delayed.ddg:DDG",
    "features-replay": "solvers.delayed.features_replay:FeaturesReplay",
    "fdg": "solvers.delayed.fdg:FDG",
    "petra": "solvers.delayed.petra:Petra",
    "pd-asgd": "solvers.delayed.pd_asgd:PDASGD",
    "ampnet": "solvers.instances.ampnet:AMPNet",
    "local-updates": "solvers.local.local_updates:LocalUpdates",
}
"""Name -> module:class, one line for each method."""

DEFAULT = "augmented-lagrangian"
"""The method of a run that names none."""

GROUP = "hybrid.solvers"
"""The entry points by which another package adds a method: NAME = "its.module:Class"."""


def names() -> list[str]:
    """All methods; ValueError if another package's method has a name that is taken."""
    return [*OWN, *_others()]


def solver_class(name: str) -> type[Solver]:
    """The class of a method; ValueError for an unknown name suggests the nearest one."""
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        found: type[Solver] = getattr(import_module(module), attribute)
        return found
    others = _others()
    if name not in others:
        raise ValueError(unknown(name, [*OWN, *others], "solver"))
    return _loaded(others[name])


def _others() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in OWN or point.name in found:
            raise ValueError(
                f"{_package(point)} adds a solver {point.name!r}, a name that is taken: uninstall "
                "it, or give its solver another name"
            )
        found[point.name] = point
    return found


def _loaded(point: EntryPoint) -> type[Solver]:
    from solvers.base import Solver

    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"solver {point.name!r} of {_package(point)} cannot be imported: {error}"
        ) from None
    if isinstance(found, type) and issubclass(found, Solver) and found.name == point.name:
        return found
    raise ValueError(
        f"{_package(point)} adds {point.value} as solver {point.name!r}, but that is no Solver "
        f"whose name is {point.name!r}"
    )


def _package(point: EntryPoint) -> str:
    return "another package" if point.dist is None else point.dist.name
