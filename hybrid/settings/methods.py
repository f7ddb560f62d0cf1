"""The settings that methods, strategies and samplers declare, each in a section of its own; and any
setting in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hybrid.registries import SAMPLERS
from hybrid.settings.config import Config, Section, declared_settings
from hybrid.settings.sections.base import field_docs, first_fault
from hybrid.solvers import Solver, acting, registry
from hybrid.solvers.acting import nearest
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.named import Named
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.base import Strategy

Made = TypeVar("Made")

NAMED: Mapping[str, Named[Any]] = {"sync": STRATEGIES, "sampler": SAMPLERS}
"""Sections whose settings are those of what their `name` names; a line a section."""


def solver(config: Config) -> Solver:
    """The solver named in [solver], with its settings."""
    settings = dict(config.solver)
    return _make(registry.solver_class(settings.pop("name")), "solver", settings)


def correction(config: Config) -> PassSettings:
    """The exact pass of the correction."""
    return _make(PassSettings, "correction", config.correction)


def sync(config: Config) -> Strategy:
    """The strategy named in [sync], with its settings."""
    made: Strategy = named(config, "sync")
    return made


def named(config: Config, section: str) -> Any:
    """What a section of `NAMED` names, with its settings."""
    settings = dict(getattr(config, section))
    return _make(NAMED[section][settings.pop("name")], section, settings)


def values(made: Any) -> dict[str, Any]:
    """The settings of a solver, of a pass, of a strategy, of a sampler."""
    assert is_dataclass(made)
    return {f.name: getattr(made, f.name) for f in fields(made) if f.init}


def known_settings(name: str, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every "section.key" there is with the solver `name`, and its help.

    `names`: what sections of `NAMED` name, if not their default.
    """
    known = declared_settings()
    chosen = {section: (names or {}).get(section, of.default) for section, of in NAMED.items()}
    for section, cls in (
        ("solver", registry.solver_class(name)),
        ("correction", PassSettings),
        *((section, NAMED[section][each]) for section, each in chosen.items()),
    ):
        known |= {f"{section}.{key}": text for key, text in field_docs(cls).items()}
    return known


def unknown(dotted: str, name: str, names: Mapping[str, str] | None = None) -> str:
    """What to say of a setting that a run with the solver `name` does not have."""
    known = known_settings(name, names)
    section, _, key = dotted.rpartition(".")
    if section in NAMED and (having := _having(section, key)):
        chosen = (names or {}).get(section, NAMED[section].default)
        many = ", ".join(having)
        return f"{dotted} is a setting of {many}; this run's {section}.name is {chosen}"
    near = _named(key, known)
    others = [] if near and section != "solver" else _having("solver", key)
    if others:
        text = f"solver.{key} is a setting of {', '.join(others)}; this run's solver is {name}"
    else:
        text = f"unknown setting {dotted!r}"
        near = near or [*filter(None, [nearest(dotted, known)])]
        text += "" if near else f"; known: {', '.join(known)}"
    return text + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def sections_of(key: str) -> list[str]:
    """Every "section.key" with this key that there is with any solver."""
    anywhere = [*declared_settings(), *(f"correction.{key}" for key in field_docs(PassSettings))]
    own = [f"{section}.{key}" for section in ("solver", *NAMED) if _having(section, key)]
    return [*_named(key, anywhere), *own]


def _named(key: str, known: Iterable[str]) -> list[str]:
    return [dotted for dotted in known if dotted.rpartition(".")[2] == key]


def _having(section: str, key: str) -> list[str]:
    """The solvers, or what there is for a section of `NAMED`, that have a setting."""
    known: Named[Any] = registry.SOLVERS if section == "solver" else NAMED[section]
    found = []
    for name in known:
        with suppress(ValueError):  # one that another package gives, and that cannot be had
            owner: Any = known[name]
            found += [name] * (key in field_docs(owner))
    return found


def _make(cls: type[Made], section: str, settings: Mapping[str, Any]) -> Made:
    try:
        made: Made = TypeAdapter(cls).validate_python(settings)
    except ValidationError as error:
        raise ValueError(f"{section}.{first_fault(error)}") from None
    for key, value in vars(made).items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{section}.{key} is {value}; it must be finite")
    return made


def explained(asked: str, flags: Mapping[str, str]) -> list[str]:
    """A paragraph a setting: of "section.key", or of every one with that key.

    `flags`: "section.key" -> the flag that gives it. ValueError names the nearest known setting.
    """
    places = [asked] if "." in asked else sections_of(asked)
    found = [paragraph for place in places for paragraph in _paragraphs(place, flags)]
    if not found:
        raise ValueError(unknown(asked, registry.DEFAULT))
    return found


def conditions(section: str, name: str, owner: str = "") -> str:
    """Where a setting has an effect, and where it works, in a sentence each; empty: anywhere.

    `owner` is the solver, strategy or sampler that it is a setting of.
    """
    cls = declaring(section, owner)
    if cls is None or name not in acting.declared(cls):
        return ""
    found = acting.conditions(cls, section, name, whole_section=False)
    verbs = dict.fromkeys(condition.verb for condition in found)
    return " ".join(
        f"It {verb} only where {'; and where '.join(c.where for c in found if c.verb == verb)}."
        for verb in verbs
    )


def declaring(section: str, owner: str = "") -> Any:
    """The class that declares a section's settings, of an owner where it depends on one."""
    if section == "correction":
        return PassSettings
    if section == "solver":
        return registry.solver_class(owner or registry.DEFAULT)
    if section in NAMED:
        return NAMED[section][owner or NAMED[section].default]
    return Config.model_fields[section].annotation if section in Config.model_fields else None


def _paragraphs(dotted: str, flags: Mapping[str, str]) -> Iterator[str]:
    """One for each meaning that a setting has."""
    section, _, key = dotted.partition(".")
    owners: dict[str, list[str]] = {}
    for owner, help_text, kind, default in _meanings(section, key):
        said = f"{dotted}: {kind}, by default {_shown(default)}\n  {help_text}"
        if where := conditions(section, key, owner):
            said += f"\n  {where}"
        owners.setdefault(said, []).append(owner)
    for said, names in owners.items():
        by = f"\n  of {', '.join(names)}" if names[0] else ""
        flag = f"\n  also {flags[dotted]}" if dotted in flags else ""
        yield said + by + flag


def _meanings(section: str, key: str) -> Iterator[tuple[str, str, str, Any]]:
    """Who has a setting, its help, its type, its default."""
    owners: Iterable[str] = [""]
    if key != "name" and (section == "solver" or section in NAMED):
        owners = registry.names() if section == "solver" else NAMED[section]
    for owner in owners:
        known = {}
        with suppress(ValueError):  # a method of another package that cannot be had
            method = owner if section == "solver" and owner else registry.DEFAULT
            known = known_settings(method, {section: owner} if section in NAMED and owner else {})
        if f"{section}.{key}" in known:
            yield owner, known[f"{section}.{key}"], *_declared(section, key, owner)


def _declared(section: str, key: str, owner: str) -> tuple[str, Any]:
    """Type and default of a setting."""
    if key == "name" and (section in NAMED or section == "solver"):
        return "a name", registry.DEFAULT if section == "solver" else NAMED[section].default
    cls = declaring(section, owner)
    setting, hint = acting.declared(cls)[key], get_type_hints(cls)[key]
    limits = [f"which must {allowed.must}" for allowed in setting.allowed]
    if issubclass(cls, Section):
        limits = [
            f"{word} {getattr(limit, name):g}"
            for limit in cls.model_fields[key].metadata
            for name, word in _LIMITS.items()
            if hasattr(limit, name)
        ]
    return ", ".join([_words(hint), *limits]), setting.default


_LIMITS = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}
"""What limits a number, and how it is said."""


def _words(kind: Any) -> str:
    """A type: the values of a choice, else its name."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(part) for part in get_args(kind) if part is not NoneType)
    return kind.__name__ if get_origin(kind) is None else str(kind).removeprefix("collections.abc.")


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
