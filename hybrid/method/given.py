"""A field that a user gives by name, as a class or as an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Given(Generic[T]):
    """A field that takes an object of a kind, its class or its name, and holds an object.

    A name or a class stands for the object with its defaults. ValueError for anything else.
    """

    def __init__(self, kind: type[T], by_name: Callable[[str], type[T]], default: str) -> None:
        """`by_name` raises ValueError for an unknown name and suggests the nearest one."""
        self.kind, self.by_name, self.default = kind, by_name, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, made: None, owner: type) -> str: ...
    @overload
    def __get__(self, made: object, owner: type) -> T: ...
    def __get__(self, made: object | None, owner: type) -> T | str:
        """On the class, the default: dataclasses ask for it."""
        if made is None:
            return self.default
        found: T = vars(made)[self.name]
        return found

    def __set__(self, made: object, value: T | type[T] | str) -> None:
        vars(made)[self.name] = understood(value, self.kind, self.name, self.by_name)


def understood(value: Any, kind: type[T], name: str, by_name: Callable[[str], type[Any]]) -> T:
    """The object of a `kind` that a user means; ValueError if `value` is none of that kind."""
    given = by_name(value) if isinstance(value, str) else value
    if isinstance(given, type) and issubclass(given, kind):
        try:
            return given()
        except TypeError as error:
            raise ValueError(
                f"{name} is the class {given.__name__}, which cannot be made without settings "
                f"({error}): give an object of it"
            ) from None
    if isinstance(given, kind):
        return given
    raise ValueError(
        f"{name} is {repr(value)[:80]}, no {kind.__name__}: give an object or a class that derives "
        f"from {kind.__module__}.{kind.__name__}, or the name of one, as hybrid list has them"
    )
