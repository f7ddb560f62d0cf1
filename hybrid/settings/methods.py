"""The settings that methods and strategies declare: [solver], [correction] and [sync]."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from math import isfinite
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hybrid.settings.config import Config, declared_settings, first_fault
from solvers import Solver, registry
from solvers.passes.exact import PassSettings
from solvers.sync import registry as strategies
from solvers.sync.base import Strategy

Made = TypeVar("Made")


def solver(config: Config) -> Solver:
    """The solver named in [solver], with its settings."""
    settings = dict(config.solver)
    return _make(registry.solver_class(settings.pop("name")), "solver", settings)


def correction(config: Config) -> PassSettings:
    """The exact pass of the correction."""
    return _make(PassSettings, "correction", config.correction)


def sync(config: Config) -> Strategy:
    """The strategy named in [sync], with its settings."""
    settings = dict(config.sync)
    return _make(strategies.strategy_class(settings.pop("name")), "sync", settings)


def values(made: Solver | PassSettings | Strategy) -> dict[str, Any]:
    """The settings of a solver, of a pass, or of a strategy."""
    assert is_dataclass(made)
    return {f.name: getattr(made, f.name) for f in fields(made) if f.init}


def known_settings(name: str, strategy: str = strategies.DEFAULT) -> dict[str, str]:
    """Every "section.key" there is with the solver `name` and the strategy, and its help."""
    known = declared_settings()
    for section, cls in (
        ("solver", registry.solver_class(name)),
        ("correction", PassSettings),
        ("sync", strategies.strategy_class(strategy)),
    ):
        known |= {f"{section}.{key}": text for key, text in _field_docs(cls).items()}
    return known


def unknown(dotted: str, name: str, strategy: str = strategies.DEFAULT) -> str:
    """What to say of a setting that a run with the solver `name` does not have."""
    known = known_settings(name, strategy)
    section, _, key = dotted.rpartition(".")
    if section == "sync" and (having := _strategies_with(key)):
        return f"sync.{key} is a setting of {', '.join(having)}; this run's sync.name is {strategy}"
    near = _named(key, known)
    others = [] if near and section != "solver" else _methods_with(key)
    if others:
        text = f"solver.{key} is a setting of {', '.join(others)}; this run's solver is {name}"
    else:
        text = f"unknown setting {dotted!r}"
        near = near or difflib.get_close_matches(dotted, known, 1, 0.5)
        text += "" if near else f"; known: {', '.join(known)}"
    return text + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def sections_of(key: str) -> list[str]:
    """Every "section.key" with this key that there is with any solver."""
    anywhere = [*declared_settings(), *(f"correction.{key}" for key in _field_docs(PassSettings))]
    own = [f"solver.{key}"] * bool(_methods_with(key)) + [f"sync.{key}"] * bool(
        _strategies_with(key)
    )
    return [*_named(key, anywhere), *own]


def _named(key: str, known: Iterable[str]) -> list[str]:
    return [dotted for dotted in known if dotted.rpartition(".")[2] == key]


def _strategies_with(key: str) -> list[str]:
    every = strategies.STRATEGIES
    return [name for name in every if key in _field_docs(strategies.strategy_class(name))]


def _methods_with(key: str) -> list[str]:
    """The methods that have a setting."""
    found = []
    for name in registry.names():
        with suppress(ValueError):  # a method that another package gives, and that cannot be had
            found += [name] * (key in _field_docs(registry.solver_class(name)))
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


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """The docstrings written below a dataclass's fields, through its bases."""
    docs: dict[str, str] = {}
    given = {f.name for f in fields(cls) if f.init}
    for base in reversed(cls.__mro__[:-1]):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for pair in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)) if name in given:
                    docs[name] = str(text)
    return docs
