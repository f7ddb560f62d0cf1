"""Settings of `hybrid rl`: defaults < TOML file < command line, validated, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from hybrid.settings.resolve import read_toml
from hybrid.settings.sections.base import first_fault
from hybrid.solvers import acting
from hybrid.solvers.acting import Facts, unknown
from hybrid_rl.settings import RlConfig, RlSettings, help_texts


def load(path: Path | None, overrides: Mapping[str, Any], base: Path | None = None) -> RlConfig:
    """Defaults < `base` (a run's own) < TOML file < `overrides`; ValueError names what is wrong."""
    given: dict[str, Any] = {}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        given.setdefault(section, {})[key] = value
    below = read_toml(base, links=False) if base else {}
    tree: dict[str, Any] = {}
    for tables in (below, read_toml(path) if path else {}, given):
        for section, table in tables.items():
            if not isinstance(table, dict):
                raise ValueError(f"{section} is {table!r}; it must be a table, [{section}]")
            tree[section] = tree.get(section, {}) | table
    known = help_texts()
    for dotted in (f"{section}.{key}" for section, table in tree.items() for key in table):
        if dotted not in known:
            raise ValueError(unknown(dotted, known, "setting"))
    try:
        config = RlConfig.model_validate(tree)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    _check(config)
    config.rl = _settled(config.rl)
    return config


def _settled(rl: RlSettings) -> RlSettings:
    """With numbers for what follows from `steps`, so that a run may go on with more steps."""
    found = {
        "random_steps": rl.random_rounds,
        "evaluate_every": rl.evaluation_interval,
        "checkpoint_every": rl.checkpoint_interval,
    }
    numbers = {name: rounds * rl.actors for name, rounds in found.items()}
    if rl.representation:
        numbers["pretrain_steps"] = rl.pretraining
    return rl.model_copy(update=numbers)


def to_toml(config: RlConfig) -> str:
    """The settings as a commented TOML file that repeats the run."""
    known, lines = help_texts(), list[str]()
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            setting = f"# {key} =" if value is None else tomli_w.dumps({key: value}).strip()
            lines.append(f"# {known[f'{section}.{key}']}\n{setting}")
        lines.append("")
    return "\n".join(lines)


def is_run(folder: Path) -> bool:
    """Whether a run folder's settings are those of `hybrid rl`."""
    try:
        return "rl" in read_toml(folder / "config.toml", links=False)
    except (OSError, ValueError):
        return False


def check_start(config: RlConfig, ranks: int) -> None:
    """ValueError for settings without an effect on so many MPI ranks, 0 where there is no MPI."""
    from hybrid.ranks.starting import check_links  # here, since it brings torch along

    rl, links = config.rl, config.links
    if ranks and rl.blocks not in (0, ranks):
        raise ValueError(
            f"rl.blocks is {rl.blocks}, and there are {ranks} MPI ranks: leave --blocks out"
        )
    if (most := max(ranks, rl.blocks)) > 2 + rl.actors:
        raise ValueError(
            f"{most} ranks are more than a representation, a learner and {rl.actors} actor(s) can "
            f"use: take {2 + rl.actors} ranks, or --actors {most - 2}"
        )
    check_links(links, ranks)
    acting.check({"links": links}, Facts(ranks=ranks))


def _check(config: RlConfig) -> None:
    rl, links = config.rl, config.links
    if rl.steps % rl.actors:
        raise ValueError(
            f"rl.steps is {rl.steps}, which is not a multiple of rl.actors ({rl.actors}): take "
            f"{max(1, rl.rounds) * rl.actors}"
        )
    if rl.random_rounds >= rl.rounds:
        raise ValueError(
            f"rl.random_steps is {rl.random_rounds * rl.actors} of {rl.steps} steps in all, so no "
            "step is left to learn in: take fewer random steps, or more steps"
        )
    if rl.pretraining and not rl.random_rounds:
        raise ValueError(
            f"rl.pretrain_steps is {rl.pretraining}, but there are no random steps to learn from: "
            "take rl.random_steps of at least 1, or rl.pretrain_steps=0"
        )
    if rl.replay_size < rl.actors:
        raise ValueError(
            f"rl.replay_size is {rl.replay_size}, and {rl.actors} actors bring as many transitions "
            f"at once: take at least {rl.actors}"
        )
    if rl.representation and rl.units % rl.layers:
        raise ValueError(
            f"rl.units is {rl.units}, which is not a multiple of rl.layers ({rl.layers}): take "
            f"{max(1, rl.units // rl.layers) * rl.layers}"
        )
    acting.check({"rl": rl, "links": links}, Facts())
