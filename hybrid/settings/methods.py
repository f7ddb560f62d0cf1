"""The settings that methods, strategies and samplers declare, each in a section of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hybrid.registries import SAMPLERS
from hybrid.settings.config import Config, declared_settings
from hybrid.settings.docstrings import field_docs
from hybrid.settings.sections.base import first_fault
from hybrid.solvers import Solver, registry
from hybrid.solvers.checks import nearest
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
    others = [] if near and section != "solver" else _methods_with(key)
    if section == "solver" and not near and not others:
        likely = nearest(key, _keys_of_methods(), 0.6)
        key, others = (likely, _methods_with(likely)) if likely else (key, [])
        if name in others:
            return f"unknown setting {dotted!r}; did you mean 'solver.{key}'?"
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
    own = [f"solver.{key}"] * bool(_methods_with(key))
    own += [f"{section}.{key}" for section in NAMED if _having(section, key)]
    return [*_named(key, anywhere), *own]


def _named(key: str, known: Iterable[str]) -> list[str]:
    return [dotted for dotted in known if dotted.rpartition(".")[2] == key]


def _having(section: str, key: str) -> list[str]:
    """What there is for a section of `NAMED` that has a setting."""
    known, found = NAMED[section], []
    for name in known:
        with suppress(ValueError):  # one that another package gives, and that cannot be had
            found += [name] * (key in (f.name for f in fields(known[name])))
    return found


def _keys_of_methods() -> list[str]:
    """Every setting that some method has."""
    found: dict[str, None] = {}
    for name in registry.names():
        with suppress(ValueError):
            found |= dict.fromkeys(field_docs(registry.solver_class(name)))
    return [*found]


def _methods_with(key: str) -> list[str]:
    """The methods that have a setting."""
    found = []
    for name in registry.names():
        with suppress(ValueError):  # a method that another package gives, and that cannot be had
            found += [name] * (key in field_docs(registry.solver_class(name)))
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
