"""Classes by name, from which a setting chooses; each is imported at its first use."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

from hybrid.solvers.acting import nearest, unknown

APART = {
    **dict.fromkeys(("solver.ampnet", "solver.pd-asgd"), "messages"),
    "solver.auxnet": "auxnet",
    "strategy.hpsgd": "hpsgd",
    **dict.fromkeys(("sampler.auto-assist", "sampler.selective-backprop"), "samplers"),
}
"""Entry point -> folder in wings/ of the package that adds it."""


@cache
def entry_points() -> EntryPoints:
    """What other packages add. A search reads a file of every installed package: it is made once.

    [project.entry-points.hybrid]
    "solver.mine" = "its.module:Class"      also strategy, sampler, link, data, command, report
    """
    return metadata.entry_points(group="hybrid")


class Named(Mapping[str, Any]):
    """What there is of a `kind`, name -> object: this package's, and that of other packages.

    Another package adds an object by an entry point "KIND.NAME", under a name that nobody has yet.
    A class must derive from `base`, and have this name as its `name`.
    ValueError, on one line, for a name that is not known and for an entry point that cannot be
    used, which must not end a command that has no need of it.
    """

    def __init__(
        self, kind: str, places: Mapping[str, Any], default: str = "", base: str = ""
    ) -> None:
        """`places`: this package's names, and where each object is, as "module:attribute"."""
        self.kind, self.places, self.default, self.base = kind, places, default, base

    def points(self) -> dict[str, EntryPoint]:
        """The entry points of other packages by name; the first one of a name counts."""
        prefix = f"{self.kind.partition(' ')[0]}."
        points = [p for p in reversed([*entry_points()]) if p.name.startswith(prefix)]
        named = {p.name.removeprefix(prefix): p for p in points}
        return {name: point for name, point in named.items() if name not in self.places}

    def __getitem__(self, name: str) -> Any:
        if name in self.places:
            return imported(self.places[name])
        if name not in self.points():
            if wing := APART.get(f"{self.kind}.{name}"):
                raise ValueError(
                    f"{self.kind} {name!r} is of a package of its own: run `pip install "
                    f"./wings/{wing}` in the root of this repository"
                )
            raise ValueError(unknown(name, self, self.kind))
        return self._load(name, self.points()[name])

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self.points()

    def __iter__(self) -> Iterator[str]:
        return iter([*self.places, *reversed(self.points())])

    def __len__(self) -> int:
        return len(self.places) + len(self.points())

    def usable(self, left_out: Callable[[str], None]) -> dict[str, Any]:
        """All that can be had, by name."""
        return {name: self[name] for name in self.places} | self.added(left_out)

    def added(
        self, left_out: Callable[[str], None], load: Callable[[str], Any] | None = None
    ) -> dict[str, Any]:
        """What other packages add, by name; `left_out` is told, on one line, of what cannot be."""
        objects = {}
        for name in reversed(self.points()):
            try:
                objects[name] = (load or self.__getitem__)(name)
            except ValueError as error:
                left_out(f"{error} (it is left out)")
        return objects

    def _load(self, name: str, point: EntryPoint) -> Any:
        package = "another package" if point.dist is None else point.dist.name
        try:
            thing = point.load()
        except (Exception, SystemExit) as error:  # whatever the module of another package raises
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{self.kind} {name!r} of {package} cannot be imported: {why}: install that "
                "package again, or uninstall it"
            ) from None
        base = imported(self.base) if self.base else object
        fits = isinstance(thing, type) and issubclass(thing, base)
        if self.base and not (fits and getattr(thing, "name", None) == name):
            raise ValueError(
                f"{package} adds {point.value} as {self.kind} {name!r}, but that is no "
                f"{base.__name__} whose name is {name!r}"
            )
        return thing


def imported(place: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def is_reference(name: str) -> bool:
    """Whether a name refers to a user's function or class, module:name, not to a built-in.

    A built-in may have a number, as in mlp:128.
    """
    return ":" in name and not name.partition(":")[2].isdecimal()


def load_object(name: str, flag: str) -> Any:
    """What has the name that follows `flag` on a command line; ValueError with the reason."""
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if module.endswith(".py"):
            why = f"it is the name of a file: give {flag}{module[:-3]}:{attribute}"
        raise ValueError(f"{flag}{name}: {module} cannot be imported: {why}") from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = nearest(part, dir(value), 0.6)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{flag}{name}: {module} has no {attribute}{hint}")
        value = getattr(value, part)
    return value


def made_by_user(what: str, code: Callable[[], Any], wanted: type) -> Any:
    """What a user's code gives; ValueError, on one line, if it fails or gives anything else."""
    try:
        made = code()
    except Exception as error:  # whatever a user's code raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} failed: {why}") from None
    if not isinstance(made, wanted):
        raise ValueError(
            f"{what} gave a {type(made).__name__}, not a torch {wanted.__name__}: return one"
        )
    return made
