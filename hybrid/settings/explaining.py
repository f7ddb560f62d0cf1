"""A setting in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hybrid.settings.config import Config, Section
from hybrid.settings.methods import NAMED, known_settings, sections_of, unknown
from hybrid.solvers import acting, registry
from hybrid.solvers.exact.exact_pass import PassSettings


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
