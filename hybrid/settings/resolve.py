"""Settings of a run: defaults < TOML file < command line, validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid.settings import methods
from hybrid.settings.config import Config, Section, declared_settings
from hybrid.settings.rounds import settled, wanted_correction
from hybrid.settings.sections.base import first_fault
from hybrid.settings.spelling import respelled
from hybrid.settings.text import read_toml
from hybrid.solvers import registry
from hybrid.solvers.acting import Known, check


def load(path: Path | None, overrides: Mapping[str, Any], base: Path | None = None) -> Config:
    """Read a TOML file, lay `overrides` ("section.key" -> value) over it, validate.

    `base` is a run's own TOML file, below both; its [solver], [correction] and [rounds] hold only
    for the method it names.
    """
    tree, _ = respelled(read_toml(base, links=False) if base is not None else {})
    upper, notices = respelled(read_toml(path) if path is not None else {})
    given, more = respelled(_by_section(overrides))
    for section, values in given.items():
        table = upper.setdefault(section, {})
        if "" in values:
            raise ValueError(methods.unknown(section, str(_name(upper, registry.DEFAULT))))
        _check_table(section, table)
        more += _set(table, values)
    if _name(upper, _name(tree)) != _name(tree):
        tree.pop("solver", None)
        tree.pop("correction", None)
        rounds = tree.get("rounds", {})
        tree["rounds"] = {k: rounds[k] for k in rounds if k == "memory_gb"}
    for section in methods.NAMED:
        if _name(upper, _name(tree, None, section), section) != _name(tree, None, section):
            tree.pop(section, None)
    for section, table in upper.items():
        below = tree.get(section, {})
        both = isinstance(below, dict) and isinstance(table, dict)
        tree[section] = _laid_over(below, table) if both else table
    config = resolve(tree)
    config.notices = [*dict.fromkeys(notices + more)]
    return config


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of settings; ValueError names the setting, its value and the limit."""
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    for section in tree.keys() & Config.model_fields.keys():
        _check_table(section, tree[section])
    tree["solver"] = {"name": registry.DEFAULT, **tree.get("solver", {})}
    name = str(tree["solver"]["name"])
    for section, of in methods.NAMED.items():
        tree[section] = {"name": of.default, **tree.get(section, {})}
    names = {section: str(tree[section]["name"]) for section in methods.NAMED}
    known = methods.known_settings(name, names)
    for section, table in tree.items():
        if section not in Config.model_fields:
            inside = next(iter(table), "") if isinstance(table, dict) else ""
            dotted = f"{section}.{inside}" if inside else section
            raise ValueError(methods.unknown(dotted, name, names))
        for dotted in (f"{section}.{key}" for key in table):
            if dotted not in known:
                raise ValueError(methods.unknown(dotted, name, names))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    solver = methods.solver(config)
    check({"model": config.model}, Known(solver=solver))
    config.rounds = settled(solver, config.rounds)
    config.solver = {"name": solver.name, **methods.values(solver)}
    for section in methods.NAMED:
        made = methods.named(config, section)
        setattr(config, section, {"name": made.name, **methods.values(made)})
    share = config.train.batch_size // max(1, config.split.replicas)
    wanted = wanted_correction(solver, config.rounds, share)
    config.correction = {**wanted, **config.correction}
    config.correction = methods.values(methods.correction(config))
    return config


def check_command(command: str, config: Config) -> None:
    """ValueError for a setting that a command does not read: train, bench or plan."""
    tables = {name: table for name, table in vars(config).items() if isinstance(table, Section)}
    check(tables, Known(command=command, split=config.split, model=config.model))


def refuse_rounds(config: Config, why: str) -> None:
    """ValueError for rounds, or micro-batches of corrections, that are not the solver's own.

    Memory they may take is a limit, not a way to train.
    """
    plain = resolve({"solver": config.solver, "train": config.train.model_dump()})
    own = {f"rounds.{name}": value for name, value in plain.rounds.model_dump().items()}
    asked = {f"rounds.{name}": value for name, value in config.rounds.model_dump().items()}
    parts = "correction.micro_batches"
    own[parts], asked[parts] = (c.correction["micro_batches"] for c in (plain, config))
    del asked["rounds.memory_gb"]
    # one may follow from another, so all are named
    given = [f"{name} is {value!r}" for name, value in asked.items() if value != own[name]]
    if given:
        said = " and ".join(given)
        raise ValueError(f"{said}, but {why}, so it would change nothing: leave that out")


def _by_section(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides as a tree of sections."""
    tree: dict[str, Any] = {}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = value
    return tree


def _check_table(section: str, table: object) -> None:
    if not isinstance(table, dict):
        named = isinstance(table, str) and f"{section}.name" in declared_settings()
        hint = f": give {section}.name={table}" if named else ""
        raise ValueError(f"{section} is {table!r}; it must be a table, [{section}]{hint}")


def _set(table: dict[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Put the values of overrides into a section, those of its arguments one by one.

    The rate of an optimizer does not go over to another one, which is reported.
    """
    notices = []
    names = [str(one["name"]).lower() for one in (table, values) if "name" in one]
    if len({*names}) > 1 and "lr" in table and "lr" not in values:
        notices.append(
            f"optimizer.lr {table.pop('lr')} is that of {names[0]}, and {names[1]} has its usual "
            "one: give --lr for another"
        )
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if outer == "arguments" and inner and isinstance(table.setdefault(outer, {}), dict):
            table[outer][inner] = value
        else:
            table[key] = value
    return notices


def _laid_over(below: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """The entries of both; a class's arguments, interval and rate hold only for that class."""
    names = [str(t.get("name", below.get("name"))).lower() for t in (below, table)]
    if names[0] != names[1]:
        below = {k: v for k, v in below.items() if k not in ("arguments", "interval", "lr")}
    merged = {**below, **table}
    arguments = [t["arguments"] for t in (below, table) if "arguments" in t]
    if arguments and all(isinstance(a, dict) for a in arguments):
        merged["arguments"] = {k: v for a in arguments for k, v in a.items()}
    return merged


def _name(tree: Mapping[str, Any], default: object = None, section: str = "solver") -> object:
    """The method, the strategy or the sampler that a tree of settings names."""
    table = tree.get(section, {})
    return table.get("name", default) if isinstance(table, dict) else default
