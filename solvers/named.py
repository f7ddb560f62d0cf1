"""Classes by name, from which a setting chooses; each is imported at its first use."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from hybrid.solvers.checks import unknown

T = TypeVar("T")


class Named(Mapping[str, type[T]]):
    """The classes of a `kind`, name -> class: this package's and those of other packages.

    Another package adds a class by an entry point of the `group`, NAME = "its.module:Class". The
    class must derive from `base` and have this name as its `name`. ValueError for a name that is
    not known, which tells the nearest, and for an entry point that cannot be used.
    """

    def __init__(
        self, kind: str, places: dict[str, str], default: str, group: str = "", base: str = ""
    ) -> None:
        self.kind, self.places, self.default = kind, places, default
        self.group, self.base = group, base

    def __getitem__(self, name: str) -> type[T]:
        if name in self.places:
            own: type[T] = imported(self.places[name])
            return own
        others = self.others()
        if name not in others:
            raise ValueError(unknown(name, [*self.places, *others], self.kind))
        return self._loaded(others[name])

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self.others()

    def __iter__(self) -> Iterator[str]:
        return iter([*self.places, *self.others()])

    def __len__(self) -> int:
        return len(self.places) + len(self.others())

    def others(self) -> dict[str, EntryPoint]:
        """The entry points of other packages; ValueError for a name that is taken."""
        return added(self.group, self.kind, self.places) if self.group else {}

    def _loaded(self, point: EntryPoint) -> type[T]:
        try:
            found = point.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.kind} {point.name!r} of {package(point)} cannot be imported: {error}"
            ) from None
        base = imported(self.base)
        named = getattr(found, "name", None) == point.name
        if isinstance(found, type) and issubclass(found, base) and named:
            return found
        raise ValueError(
            f"{package(point)} adds {point.value} as {self.kind} {point.name!r}, but that is no "
            f"{base.__name__} whose name is {point.name!r}"
        )


def added(group: str, kind: str, taken: Container[str]) -> dict[str, EntryPoint]:
    """What other packages add of a kind, by name; ValueError for a name that is taken."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in taken or point.name in found:
            raise ValueError(
                f"{package(point)} adds a {kind} {point.name!r}, a name that is taken: uninstall "
                f"it, or give its {kind} another name"
            )
        found[point.name] = point
    return found


def imported(place: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def package(point: EntryPoint) -> str:
    """The package that an entry point is of."""
    return "another package" if point.dist is None else point.dist.name
