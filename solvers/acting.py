"""What a setting allows and where it has an effect, declared in its type; one evaluator for all.

    MOVES = Acts("multipliers move", lambda run: run.solver.moves(run.setup))

    beta: Positive = 5e-4
    kappa_step: Annotated[NotNegative, MOVES] = 1.0

A frozen dataclass and a pydantic model declare alike. A class has in `acts` ("section.key" or
"section.*" -> condition) what holds for settings that it inherits, or where they are those of that
section, and in `needs` what it needs whatever its settings are. A condition sees the `Facts` of a
run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
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


def fault_of(numbers: Any, count: int = 0) -> str:
    """What numbers for the machines of `count` blocks (0: of any) must be; empty if they are."""
    right = isinstance(numbers, list | tuple) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 1e-6 <= x <= 1e6 for x in numbers
    )
    if right and (not count or not numbers or len(numbers) == count):
        return ""
    blocks = f"each of {count} blocks" if count else "each block"
    return f"it must have a number from 1e-6 to 1e6 for the machine of {blocks}"


LARGEST, SMALLEST = 1e15, 1e-30
"""Of any number, but for 0: beyond, float32 overflows."""


@dataclass(frozen=True)
class Allowed:
    """The values that a setting may have; `must` completes "it must"."""

    must: str
    holds: Callable[[Any], object]


NOT_YET: Any = object()
"""A fact that is not known yet."""


class NotYetKnown(Exception):  # noqa: N818  it is no error, but leaves a condition for later
    """A condition asks for a fact that is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a condition may ask of a run. A fact that is not known yet raises `NotYetKnown`."""

    settings: Any = NOT_YET
    """The object that has the setting in question."""
    command: str = NOT_YET
    """train, bench or plan."""
    solver: Any = NOT_YET
    setup: Any = NOT_YET
    sync: Any = NOT_YET
    sampler: Any = NOT_YET
    rounds: Any = NOT_YET
    train: Any = NOT_YET
    optimizer: Any = NOT_YET
    schedule: Any = NOT_YET
    delay: Any = NOT_YET
    checkpoint: Any = NOT_YET
    model: Any = NOT_YET
    data: Any = NOT_YET
    batch_transform: Any = NOT_YET
    """The user's function of a mini-batch, or None."""
    own_data: bool = NOT_YET
    """Whether the data are the user's."""
    ordered: bool = NOT_YET
    """Whether the data say in what order samples come."""
    streamed: bool = NOT_YET
    """Whether they can be had in that order alone."""
    tested: bool = NOT_YET
    """Whether there is a validation or test set."""
    resume: bool = NOT_YET
    replicas: int = NOT_YET
    ranks: int = NOT_YET
    """Processes that a launcher has started."""
    steps: int = NOT_YET
    """Mini-batches of an epoch."""
    draws: bool = NOT_YET
    """Whether layers draw random numbers."""
    normed: bool = NOT_YET
    """Whether the network has running statistics."""
    frozen: bool = NOT_YET
    """Whether a parameter is frozen for the whole run."""
    survival: float = NOT_YET
    """Least probability that a unit is there in a pass."""
    link_settings: frozenset[str] = NOT_YET
    """The settings of [links] that the kind of links reads."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is NOT_YET:
            raise NotYetKnown(name)
        return value

    def copy_with(self, **facts: Any) -> "Facts":
        return Facts(**{**vars(self), **facts})


@dataclass(frozen=True)
class Acts:
    """Where a setting has an effect: elsewhere a value other than its default is rejected."""

    where: str
    holds: Callable[[Facts], object]
    """Whether the condition is met; it counts as met while a fact is not known yet."""
    remedy: str = "leave it out"
    here: Callable[[Facts], object] | None = None
    """What the facts are instead, for the message."""

    verb: ClassVar[str] = "has an effect"


@dataclass(frozen=True)
class Needs(Acts):
    """Where a value other than a setting's default can work at all, or a class with any."""

    verb: ClassVar[str] = "works"


Positive = Annotated[float, Allowed("be positive", lambda value: value > 0)]
NotNegative = Annotated[float, Allowed("be 0 or positive", lambda value: value >= 0)]
Share = Annotated[float, Allowed("lie in [0, 1)", lambda value: 0 <= value < 1)]
ShareOrWhole = Annotated[float, Allowed("lie in (0, 1]", lambda value: 0 < value <= 1)]
Count = Annotated[int, Allowed("be at least 1", lambda value: value >= 1)]
CountOrZero = Annotated[int, Allowed("be 0 or positive", lambda value: value >= 0)]


REPLICAS = Acts(
    "there are replicas", lambda run: run.replicas > 1, "leave it out, or ask for replicas"
)


SEVERAL_BLOCKS = Acts("there are several blocks", lambda run: run.setup.blocks > 1)


class Settings:
    """Of frozen dataclasses of settings: their values are those that their types allow."""

    name: ClassVar[str] = ""
    """What a setting calls it that chooses among several; empty: none does."""

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, setting in declared(cls).items():
            setting.check(name, getattr(self, name))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings by name, with their defaults."""
        of_class: Any = cls
        return {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(of_class)
            if f.init
        }

    def usual(self) -> dict[str, Any]:
        """Values that go with others where nobody asks for them, in place of their defaults."""
        return {}


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


def check(sections: Mapping[str, Any], facts: Facts) -> None:
    """ValueError for the first setting that has no effect, or cannot work, in a run.

    `sections`: by name, objects of settings: `Settings`, or others that have `defaults` and `usual`
    as these have.
    """
    for section, settings in sections.items():
        run, cls = facts.copy_with(settings=settings), settings.__class__
        asked: list[tuple[str, Any, Sequence[Acts]]] = []
        if wanted := needs(cls):
            asked.append(("name", settings.name, wanted))
        usual = settings.usual()
        for name, setting in declared(cls).items():
            value = getattr(settings, name)
            if value is not None and value != usual.get(name, setting.default):
                asked.append((name, value, conditions(cls, section, name)))
        for name, value, all_of in asked:
            unmet = next((condition for condition in all_of if not _holds(condition, run)), None)
            if unmet is not None:
                here = "" if unmet.here is None else f", and here {unmet.here(run)}"
                raise ValueError(
                    f"{section}.{name} is {value!r}, which {unmet.verb} only where {unmet.where}"
                    f"{here}: {unmet.remedy}"
                )


def conditions(cls: Any, section: str, name: str, whole_section: bool = True) -> list[Acts]:
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
def declared(cls: Any) -> dict[str, Setting]:
    """The settings of a class that has `defaults` by name."""
    hints, settings = get_type_hints(cls, include_extras=True), {}
    for name, default in cls.defaults().items():
        hint = hints[name]
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        marks = list(_marks(hint))
        allowed = tuple(mark for mark in marks if isinstance(mark, Allowed))
        acts = tuple(mark for mark in marks if isinstance(mark, Acts))
        settings[name] = Setting(default, choices, allowed, acts)
    return settings


def _marks(hint: Any) -> Iterator[Any]:
    """Whatever an annotation is annotated with, inside a union, too."""
    for part in get_args(hint):
        if isinstance(part, (Allowed, Acts)):
            yield part
        else:
            yield from _marks(part)


def _holds(condition: Acts, run: Facts) -> bool:
    try:
        return bool(condition.holds(run))
    except NotYetKnown:
        return True
