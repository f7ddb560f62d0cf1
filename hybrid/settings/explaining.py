"""A setting in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hybrid.settings.config import Config, Section
from hybrid.settings.methods import NAMED, known_settings, sections_of, unknown
from solvers import registry
from solvers.exact.exact_pass import PassSettings


def explained(asked: str, flags: Mapping[str, str]) -> list[str]:
    """A paragraph a setting: of "section.key", or of every one with that key.

    `flags`: "section.key" -> the flag that gives it. ValueError names the nearest known setting.
    """
    places = [asked] if "." in asked else sections_of(asked)
    found = [paragraph for place in places for paragraph in _paragraphs(place, flags)]
    if not found:
        raise ValueError(unknown(asked, registry.DEFAULT))
    return found


def _paragraphs(dotted: str, flags: Mapping[str, str]) -> Iterator[str]:
    """One for each meaning that a setting has."""
    section, _, key = dotted.partition(".")
    owners: dict[str, list[str]] = {}
    for owner, help_text, kind, default in _meanings(section, key):
        said = f"{dotted}: {kind}, by default {_shown(default)}\n  {help_text}"
        owners.setdefault(said, []).append(owner)
    for said, names in owners.items():
        by = f"\n  of {', '.join(names)}" if names[0] else ""
        flag = f"\n  also {flags[dotted]}" if dotted in flags else ""
        yield said + by + flag


def _meanings(section: str, key: str) -> Iterator[tuple[str, str, str, Any]]:
    """Who has a setting, its help, its type, its default."""
    cases: list[tuple[str, str, dict[str, str]]] = [("", registry.DEFAULT, {})]
    if section == "solver" and key != "name":
        cases = [(name, name, {}) for name in registry.names()]
    elif section in NAMED and key != "name":
        cases = [(name, registry.DEFAULT, {section: name}) for name in NAMED[section]]
    for owner, method, names in cases:
        known = {}
        with suppress(ValueError):  # a method of another package that cannot be had
            known = known_settings(method, names)
        if f"{section}.{key}" in known:
            yield owner, known[f"{section}.{key}"], *_declared(section, key, method, names)


def _declared(section: str, key: str, method: str, names: Mapping[str, str]) -> tuple[str, Any]:
    """Type and default of a setting."""
    declared: Any = Config.model_fields[section].annotation
    if key == "name" and (section in NAMED or section == "solver"):
        of = NAMED.get(section)
        return "a name", registry.DEFAULT if of is None else of.default
    if isinstance(declared, type) and issubclass(declared, Section):
        field = declared.model_fields[key]
        limits = [
            f"{word} {getattr(limit, name):g}"
            for limit in field.metadata
            for name, word in (
                ("ge", "at least"),
                ("gt", "over"),
                ("le", "at most"),
                ("lt", "under"),
            )
            if hasattr(limit, name)
        ]
        return ", ".join([_words(field.annotation), *limits]), field.get_default(
            call_default_factory=True
        )
    made: Any = PassSettings
    if section == "solver":
        made = registry.solver_class(method)
    elif section in NAMED:
        made = NAMED[section][names[section]]
    return _words(get_type_hints(made)[key]), getattr(made(), key)


def _words(kind: Any) -> str:
    """A type: the values of a choice, else its name."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(part) for part in get_args(kind) if part is not NoneType)
    return kind.__name__ if get_origin(kind) is None else str(kind)


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
