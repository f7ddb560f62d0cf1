"""Classes by name, from which a setting chooses; each is imported at its first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar

from solvers.checks import unknown

T = TypeVar("T")


class Named(Mapping[str, type[T]]):
    """The classes of a `kind` by name; ValueError for an unknown name suggests the nearest one."""

    def __init__(self, kind: str, places: dict[str, str], default: str) -> None:
        self.kind, self.places, self.default = kind, places, default

    def __getitem__(self, name: str) -> type[T]:
        if name not in self.places:
            raise ValueError(unknown(name, self.places, self.kind))
        module, _, attribute = self.places[name].partition(":")
        found: type[T] = getattr(import_module(module), attribute)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
