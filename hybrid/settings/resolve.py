"""Settings of a run, merged from defaults < TOML file < command line, validated and written."""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from textwrap import wrap
from typing import Any

import tomli_w
from pydantic import ValidationError

from hybrid.files import read_whole
from hybrid.settings import methods
from hybrid.settings.config import Config, RoundSettings, Section, declared_settings
from hybrid.settings.methods import NAMED
from hybrid.settings.sections.base import first_fault
from hybrid.settings.sections.rounds import default_solver, resolve_rounds
from hybrid.solvers import registry
from hybrid.solvers.acting import Facts, check
from hybrid.solvers.exact.exact_pass import PassSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES, MOST_DOTS = 1 << 16, 2000
"""Limits of a file of settings; a resolved one has 5 kB."""
TABLES = ("arguments", "frozen")
"""Settings that are tables, merged entry by entry."""


Tables = Path | Mapping[str, Any] | None
"""A TOML file, or what it holds; None: an empty one."""


def load(file: Tables, overrides: Mapping[str, Any], base: Tables = None) -> Config:
    """Lay `overrides` ("section.key" -> value) over a file of settings, and validate them.

    `base` is a run's file, below both; its [solver], [correction] and [rounds] hold only for its
    method.
    """
    tree, upper = as_tables(base, links=False), as_tables(file)
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        table = upper.setdefault(section, {})
        if not key:
            raise ValueError(methods.unknown(section, str(_name(upper, registry.DEFAULT))))
        _check_table(section, table)
        outer, _, inner = key.partition(".")
        if outer in TABLES and inner and isinstance(table.setdefault(outer, {}), dict):
            table, key = table[outer], inner  # a table in a section is set entry by entry
        table[key] = value
    if _name(upper, _name(tree)) != _name(tree):
        for section in ("solver", "fill", "correction"):
            tree.pop(section, None)
        rounds = tree.get("rounds", {})
        tree["rounds"] = {k: rounds[k] for k in rounds if k == "memory_gb"}
    for section in NAMED:
        if _name(upper, _name(tree, None, section), section) != _name(tree, None, section):
            tree.pop(section, None)
    for section, table in upper.items():
        below = tree.get(section, {})
        both = isinstance(below, dict) and isinstance(table, dict)
        tree[section] = _merge(below, table) if both else table
    return resolve(tree)


def as_tables(file: Tables, links: bool = True) -> dict[str, Any]:
    """What a file of settings holds."""
    return read_toml(file, links) if isinstance(file, Path) else deepcopy(dict(file or {}))


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of settings; ValueError names the setting, its value and the limit."""
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    for section in tree.keys() & Config.model_fields.keys():
        _check_table(section, tree[section])
    usual = {section: of.default for section, of in NAMED.items()}
    if "name" not in tree.get("solver", {}):
        usual["solver"] = default_solver(tree.get("rounds", {}), _name(tree, usual["fill"], "fill"))
    for section, default in usual.items():
        tree[section] = {"name": default, **tree.get(section, {})}
    name = str(tree["solver"]["name"])
    names = {section: str(tree[section]["name"]) for section in NAMED}
    known = methods.known_settings(name, names)
    for section, table in tree.items():
        if section not in Config.model_fields:
            inside = next(iter(table), "") if isinstance(table, dict) else ""
            dotted = f"{section}.{inside}" if inside else section
            raise ValueError(methods.unknown(dotted, name, names))
        for key, value in table.items():
            if (dotted := f"{section}.{key}") not in known:
                raise ValueError(methods.unknown(dotted, name, names))
            if isinstance(value, str) and value != value.encode(errors="replace").decode():
                raise ValueError(
                    f"{dotted} is {value!r}: config.toml takes UTF-8 alone, so rename the file"
                )
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    solver = methods.solver(config)
    tables = {"model": config.model, "rounds": config.rounds}
    check(tables, Facts(solver=solver, rounds=config.rounds))
    config.solver = {"name": solver.name, **methods.values(solver)}
    for section in NAMED:
        chosen = methods.named(config, section)
        setattr(config, section, {"name": chosen.name, **methods.values(chosen)})
    config.correction = methods.values(methods.correction(config))
    return config


def check_command(command: str, config: Config) -> None:
    """Reject a setting that a command (train, bench or plan) does not read."""
    tables = {name: table for name, table in vars(config).items() if isinstance(table, Section)}
    check(tables, Facts(command=command, model=config.model))


def refuse_rounds(config: Config, why: str) -> None:
    """Reject rounds, or micro-batches of corrections, that differ from the solver's defaults.

    rounds.memory_gb is allowed: it is a limit, not a way to train.
    """
    solver, micro_batches = methods.solver(config), config.correction["micro_batches"]
    resolved = (resolve_rounds(solver, each) for each in (RoundSettings(), config.rounds))
    usual, rounds = (each.model_dump(exclude={"memory_gb"}) for each in resolved)
    # one may follow from another, so all are named
    changed = [f"rounds.{k} is {v!r}" for k, v in rounds.items() if v != usual[k]]
    if micro_batches != PassSettings().micro_batches:
        changed.append(f"correction.micro_batches is {micro_batches!r}")
    if changed:
        settings = " and ".join(changed)
        raise ValueError(f"{settings}, but {why}, so it would change nothing: leave that out")


def _check_table(section: str, table: object) -> None:
    if not isinstance(table, dict):
        named = isinstance(table, str) and f"{section}.name" in declared_settings()
        hint = f": give {section}.name={table}" if named else ""
        raise ValueError(f"{section} is {table!r}; it must be a table, [{section}]{hint}")


def _merge(below: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables; arguments, interval and rate of a class hold only for that class."""
    names = [str(t.get("name", below.get("name"))).lower() for t in (below, table)]
    if names[0] != names[1]:
        below = {k: v for k, v in below.items() if k not in ("arguments", "interval", "lr")}
    merged = {**below, **table}
    for name in TABLES:
        tables = [t[name] for t in (below, table) if name in t]
        if tables and all(isinstance(each, dict) for each in tables):
            merged[name] = {k: v for each in tables for k, v in each.items()}
    return merged


def _name(tree: Mapping[str, Any], default: object = None, section: str = "solver") -> object:
    """Return the name in a section of a tree of settings."""
    table = tree.get(section, {})
    return table.get("name", default) if isinstance(table, dict) else default


def read_toml(path: Path, links: bool = True) -> dict[str, Any]:
    """Read a file of settings without validating it; unless `links`, it must not be a symlink."""
    raw = read_whole(path, MOST_BYTES, links)
    try:
        # the parser's time is quadratic in the parts of a dotted key
        if max(line.count(b".") for line in raw.split(b"\n")) > MOST_DOTS:
            raise ValueError(f"more than {MOST_DOTS} dots in a line")
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Split "section.key=value"; the value is TOML, a Python number or boolean, or a string."""
    dotted, equals, value = text.partition("=")
    if not equals or "." not in dotted:
        key = dotted.strip()
        named = f"{key}.name"
        places = [named] if named in declared_settings() else methods.sections_of(key)
        meant = " or ".join(f"{place}={value}" for place in places)
        hint = f"; did you mean {meant}?" if equals and places else ""
        raise ValueError(f"--set {text!r}: write --set section.key=value{hint}")
    for read in (lambda text: tomllib.loads(f"value = {text}")["value"], _number):
        with suppress(ValueError, RecursionError):
            return dotted.strip(), read(value)
    return dotted.strip(), value


def _number(text: str) -> float:
    """Parse a number or boolean in Python's form, such as .5 and True, which TOML lacks."""
    if text in ("True", "False"):
        return text == "True"
    if not re.fullmatch(r"[+-]?\d*\.\d*([eE][+-]?\d+)?", text):
        raise ValueError(f"{text!r} is no number")
    return float(text)


def to_toml(config: Config) -> str:
    """Write the settings as a commented TOML file that repeats the run."""
    chosen = {section: getattr(config, section)["name"] for section in NAMED}
    known = methods.known_settings(config.solver["name"], chosen)
    lines: list[str] = []
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            lines += wrap(
                known[f"{section}.{key}"], 98, initial_indent="# ", subsequent_indent="# "
            )
            lines.append(f"# {key} =" if value is None else _written(key, value))
        lines.append("")
    return "\n".join(lines)


def _written(key: str, value: Any) -> str:
    """Write a setting as TOML, with a line for each entry of a table."""
    if value and isinstance(value, dict):
        return "\n".join(f"{key}.{_written(inner, v)}" for inner, v in value.items())
    return tomli_w.dumps({key: value}, indent=2).strip() if value != {} else f"{key} = {{}}"
