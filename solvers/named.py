"""Classes by name, from which a setting chooses; each is imported at its first use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, TypeVar

from hybrid.solvers.acting import unknown

T = TypeVar("T")


@cache
def entry_points(group: str) -> EntryPoints:
    """Those of a group. A search reads a file of every installed package: it is made once."""
    return metadata.entry_points(group=group)


@dataclass(frozen=True)
class Added:
    """What other packages add of a `kind`, by entry points of a `group`: NAME = "its.module:it".

    A package that cannot be used must not end a command that has no need of it. What it adds is
    refused in one line where it is asked for by its name, and left out everywhere else.
    """

    kind: str
    group: str
    taken: Container[str] = ()
    """The names of this package's own, which no other package can have."""

    def points(self) -> dict[str, EntryPoint]:
        """The entry points by name, but for those whose name is taken."""
        found = entry_points(group=self.group) if self.group else ()
        return {point.name: point for point in found if point.name not in self.taken}

    def load(self, name: str) -> Any:
        """What one of these names; ValueError, on one line, whatever its import raises."""
        point = self.points()[name]
        many = [other for other in entry_points(group=self.group) if other.name == name]
        if len(many) > 1:
            raise ValueError(self._clash(many[0]))
        try:
            return point.load()
        except (Exception, SystemExit) as error:  # whatever the module of another package raises
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{self.kind} {name!r} of {package(point)} cannot be imported: {why}: install "
                "that package again, or uninstall it"
            ) from None

    def usable(
        self, left_out: Callable[[str], None], load: Callable[[str], T] | None = None
    ) -> dict[str, T]:
        """All that can be had, by name; `left_out` is told, on one line, of each that cannot."""
        found: dict[str, T] = {}
        for point in entry_points(group=self.group):
            try:
                if point.name in self.taken:
                    raise ValueError(self._clash(point))
                found[point.name] = (load or self.load)(point.name)
            except ValueError as error:
                left_out(f"{error} (it is left out)")
        return found

    def _clash(self, point: EntryPoint) -> str:
        return (
            f"{package(point)} adds a {self.kind} {point.name!r}, a name that is taken: uninstall "
            f"it, or give its {self.kind} another name"
        )


class Named(Mapping[str, type[T]]):
    """The classes of a `kind`, name -> class: this package's and those of other packages.

    Another package adds a class by an entry point of the `group`, NAME = "its.module:Class". The
    class must derive from `base` and have this name as its `name`. ValueError for a name that is
    not known, which tells the nearest, and for an entry point that cannot be used. `apart`: the
    folders in this repository of packages that add a class.
    """

    def __init__(
        self,
        kind: str,
        places: dict[str, str],
        default: str,
        group: str = "",
        base: str = "",
        apart: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.places, self.default = kind, places, default
        self.apart = apart or {}
        self.group, self.base = group, base
        self._added = Added(kind, group, places)

    def __getitem__(self, name: str) -> type[T]:
        if name in self.places:
            own: type[T] = imported(self.places[name])
            return own
        if name not in self._added.points():
            if name in self.apart:
                raise ValueError(
                    f"{self.kind} {name!r} is of a package of its own: run `pip install "
                    f"./{self.apart[name]}` in the root of this repository"
                )
            raise ValueError(unknown(name, self, self.kind))
        return self._loaded(name)

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self._added.points()

    def __iter__(self) -> Iterator[str]:
        return iter([*self.places, *self._added.points()])

    def __len__(self) -> int:
        return len(self.places) + len(self._added.points())

    def usable(self, left_out: Callable[[str], None]) -> dict[str, type[T]]:
        """All classes that can be had, by name; `left_out` is told of each that cannot."""
        own = {name: self[name] for name in self.places}
        return own | self._added.usable(left_out, self.__getitem__)

    def _loaded(self, name: str) -> type[T]:
        found, base = self._added.load(name), imported(self.base)
        named = getattr(found, "name", None) == name
        if isinstance(found, type) and issubclass(found, base) and named:
            return found
        point = self._added.points()[name]
        raise ValueError(
            f"{package(point)} adds {point.value} as {self.kind} {name!r}, but that is no "
            f"{base.__name__} whose name is {name!r}"
        )


def imported(place: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def package(point: EntryPoint) -> str:
    """The package that an entry point is of."""
    return "another package" if point.dist is None else point.dist.name
