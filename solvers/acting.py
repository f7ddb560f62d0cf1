"""What a setting allows and where it has an effect, declared in its type; one evaluator for all.

    FILTERED = Acts("solver.filter is above 1", lambda run: run.solver.filter > 1)

    beta: Positive = 5e-4
    filter_mode: Annotated[Literal["coupling", "input"], FILTERED] = "coupling"

A frozen dataclass and a pydantic model declare alike. A class has in `acts` ("section.key" or
"section.*" -> condition) what holds for settings that it inherits, or where they are those of that
section, and in `needs` what it needs whatever its settings are. A condition sees the facts of a
run by name: solver, correction, setup, rounds, train, optimizer, sync, sampler, replicas, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints


def unknown(name: str, known: Iterable[str], kind: str) -> str:
    """An error message for a name that is not known, with the name that may be meant."""
    known = list(known)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def nearest(word: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """The known word that is most similar, in any case of letters; None below that similarity."""
    lower = {other.lower(): other for other in known}
    similar = get_close_matches(word[:100].lower(), lower, 1, least)
    return lower[similar[0]] if similar else None


LARGEST, SMALLEST = 1e15, 1e-30
"""Of any number, but for 0: beyond, float32 overflows."""


@dataclass(frozen=True)
class Allowed:
    """The values that a setting may have; `must` completes "it must"."""

    must: str
    holds: Callable[[Any], object]


@dataclass(frozen=True)
class Acts:
    """Where a setting has an effect: elsewhere a value other than its default is rejected."""

    where: str
    holds: Callable[[Any], object]
    """Of the facts of a run; one that is not known yet counts as met."""
    remedy: str = "leave it out"
    here: Callable[[Any], object] | None = None
    """What the facts are instead, for the message."""

    verb: ClassVar[str] = "has an effect"


@dataclass(frozen=True)
class Needs(Acts):
    """Where a value other than a setting's default can work at all, or a class with any."""

    verb: ClassVar[str] = "works"


Positive = Annotated[float, Allowed("be positive", lambda value: value > 0)]
NotNegative = Annotated[float, Allowed("be 0 or positive", lambda value: value >= 0)]
Share = Annotated[float, Allowed("lie in [0, 1)", lambda value: 0 <= value < 1)]
OverOne = Annotated[float, Allowed("be over 1, or 0 (off)", lambda value: value == 0 or value > 1)]
ShareOrWhole = Annotated[float, Allowed("lie in (0, 1]", lambda value: 0 < value <= 1)]
Count = Annotated[int, Allowed("be at least 1", lambda value: value >= 1)]
CountOrZero = Annotated[int, Allowed("be 0 or positive", lambda value: value >= 0)]


REPLICAS = Acts(
    "there are replicas", lambda run: run.replicas > 1, "leave it out, or ask for replicas"
)


class UnknownFactError(AttributeError):
    """A condition asks for what is not known yet."""


class Known(SimpleNamespace):
    """The facts of a run that are known already; conditions on others are left for later."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownFactError(name)


class Settings:
    """Of frozen dataclasses of settings: their values are those that their types allow."""

    name: ClassVar[str] = ""
    """What a setting calls it that chooses among several; empty: none does."""

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, setting in declared(cls).items():
            setting.check(name, getattr(self, name))


@dataclass(frozen=True)
class Setting:
    """What the declaration of one setting says."""

    default: Any
    choices: tuple[Any, ...]
    """Of a Literal; empty: it is none."""
    allowed: tuple[Allowed, ...]
    conditions: tuple[Acts, ...]

    def check(self, name: str, value: Any) -> None:
        """ValueError for a value that the type does not allow."""
        if self.choices and value not in self.choices:
            near = nearest(value, map(str, self.choices)) if isinstance(value, str) else None
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"{name} is {value!r}; choose one of {', '.join(map(str, self.choices))}{hint}"
            )
        for allowed in self.allowed if value is not None else ():
            number = abs(value) if isinstance(value, (int, float)) else 0
            if number > LARGEST:
                raise ValueError(f"{name} is {value!r}; it must be at most {LARGEST:g}")
            if 0 < number < SMALLEST:
                raise ValueError(f"{name} is {value!r}; it must be at least {SMALLEST:g}")
            try:
                held = allowed.holds(value)
            except TypeError:  # a text where a number belongs
                held = False
            if not held:
                raise ValueError(f"{name} is {value!r}; it must {allowed.must}")


def check(sections: Mapping[str, Any], run: Any) -> None:
    """ValueError for the first setting that has no effect, or cannot work, in a run.

    `sections`: by name, objects of settings, whose `usual()`, if they have it, are values that
    nobody asked for beside the defaults; `run`: the facts, of which some may be `Known` alone.
    """
    for section, settings in sections.items():
        cls: type = type(settings)
        asked: list[tuple[str, Any, Sequence[Acts]]] = []
        if wanted := needs(cls):
            asked.append(("name", settings.name, wanted))
        usual = settings.usual() if hasattr(settings, "usual") else {}
        for name, setting in declared(cls).items():
            value = getattr(settings, name)
            if value is not None and value != usual.get(name, setting.default):
                asked.append((name, value, conditions(cls, section, name)))
        for name, value, all_of in asked:
            unmet = next((condition for condition in all_of if not _holds(condition, run)), None)
            if unmet is not None:
                raise ValueError(_refusal(f"{section}.{name}", value, unmet, run))


def conditions(cls: type, section: str, name: str, whole_section: bool = True) -> list[Acts]:
    """Those of a class's setting where it stands in that section; of the whole section, too."""
    keys = {f"{section}.{name}", *([f"{section}.*"] if whole_section else [])}
    inherited = [
        condition
        for base in reversed(cls.__mro__)
        for key, condition in vars(base).get("acts", {}).items()
        if key in keys
    ]
    return [*inherited, *declared(cls)[name].conditions]


def needs(cls: type) -> list[Needs]:
    """What a class needs, whatever its settings are."""
    return [need for base in reversed(cls.__mro__) for need in vars(base).get("needs", ())]


@cache
def declared(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass or of a pydantic model by name."""
    hints, found = get_type_hints(cls, include_extras=True), {}
    for name, default in _defaults(cls).items():
        hint = hints[name]
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        marks = list(_marks(hint))
        allowed = tuple(mark for mark in marks if isinstance(mark, Allowed))
        acts = tuple(mark for mark in marks if isinstance(mark, Acts))
        found[name] = Setting(default, choices, allowed, acts)
    return found


def _defaults(cls: Any) -> dict[str, Any]:
    if hasattr(cls, "model_fields"):
        return {
            name: field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
        }
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(cls)
        if f.init
    }


def _marks(hint: Any) -> Iterator[Any]:
    """Whatever an annotation is annotated with, inside a union, too."""
    for part in get_args(hint):
        if isinstance(part, (Allowed, Acts)):
            yield part
        else:
            yield from _marks(part)


def _holds(condition: Acts, run: Any) -> bool:
    try:
        return bool(condition.holds(run))
    except UnknownFactError:
        return True


def _refusal(setting: str, value: Any, unmet: Acts, run: Any) -> str:
    here = "" if unmet.here is None else f", and here {unmet.here(run)}"
    return (
        f"{setting} is {value!r}, which {unmet.verb} only where {unmet.where}{here}: {unmet.remedy}"
    )
