"""A field that a user gives by name, as a class or as an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

from hybrid.settings.sections.base import Section

T = TypeVar("T")


class _Field(Generic[T]):
    """A field of a dataclass that holds something else than what it is given."""

    default: str

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


class Given(_Field[T]):
    """A field that takes an object of a kind, its class or its name, and holds an object.

    A name or a class stands for the object with its defaults. ValueError for anything else.
    """

    def __init__(self, kind: type[T], by_name: Callable[[str], type[T]], default: str) -> None:
        """`by_name` raises ValueError for an unknown name and suggests the nearest one."""
        self.kind, self.by_name, self.default = kind, by_name, default

    def __set__(self, made: object, value: T | type[T] | str) -> None:
        vars(made)[self.name] = understood(value, self.kind, self.name, self.by_name)


class GivenSettings(_Field[T]):
    """A field that takes settings, a mapping of them or the name alone, and holds settings.

    Of a kind that is `callable` it takes and holds a function, too. ValueError for anything else.
    """

    def __init__(self, kind: type[Section], callable: bool = False) -> None:
        self.kind, self.callable = kind, callable
        self.default = ""  # which stands for settings without any

    def __set__(self, made: object, value: T | Mapping[str, Any] | str) -> None:
        vars(made)[self.name] = self._understood(value)

    def _understood(self, value: Any) -> Any:
        if isinstance(value, self.kind) or (self.callable and callable(value)):
            return value
        first = next(iter(self.kind.model_fields))
        if isinstance(value, str) and (not value or first in ("name", "kind", "mend")):
            value = {first: value} if value else {}
        if isinstance(value, Mapping):
            return self.kind.of(self.name, value)
        also = ", or a function as hybrid.Trainer describes it" if self.callable else ""
        raise ValueError(
            f"{self.name} is {repr(value)[:80]}; it must be {self.kind.__name__}(...) or a dict of "
            f"its settings{also}"
        )


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
