"""Settings of `hybrid rl`: defaults < TOML file < command line, validated, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from hybrid.rl.settings import RlConfig, RlSettings
from hybrid.settings.config import LinkSettings, Section, first_fault
from solvers.checks import nearest


def load(path: Path | None, overrides: Mapping[str, Any], base: Path | None = None) -> RlConfig:
    """Defaults < `base` (a run's own) < TOML file < `overrides`; ValueError names what is wrong."""
    from hybrid.settings.text import read_toml

    tree: dict[str, Any] = {}
    for file, links in ((base, False), (path, True)):
        for section, table in (read_toml(file, links) if file else {}).items():
            both = isinstance(table, dict) and isinstance(tree.get(section), dict)
            tree[section] = {**tree[section], **table} if both else table
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section][key] = value
    known = help_texts()
    for section, table in tree.items():
        for key in table if isinstance(table, dict) else []:
            if f"{section}.{key}" not in known:
                raise ValueError(_unknown(f"{section}.{key}", known))
    try:
        config = RlConfig.model_validate(tree)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    _check(config)
    config.rl = _settled(config.rl)
    return config


def _settled(rl: RlSettings) -> RlSettings:
    """With a number for what follows from others, so that a run goes on by it with other steps."""
    found = {
        "random_steps": rl.random_rounds,
        "evaluate_every": rl.evaluating,
        "checkpoint_every": rl.keeping,
    }
    numbers = {name: rounds * rl.actors for name, rounds in found.items()}
    if rl.representation:
        numbers["pretrain_steps"] = rl.pretraining
    return rl.model_copy(update=numbers)


def help_texts() -> dict[str, str]:
    """Every "section.key", and what it means."""
    sections: dict[str, type[Section]] = {"rl": RlSettings, "links": LinkSettings}
    return {
        f"{section}.{key}": info.description or ""
        for section, cls in sections.items()
        for key, info in cls.model_fields.items()
    }


def to_toml(config: RlConfig) -> str:
    """The settings as a commented TOML file that repeats the run."""
    known, lines = help_texts(), list[str]()
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            written = f"# {key} =" if value is None else tomli_w.dumps({key: value}).strip()
            lines.append(f"# {known[f'{section}.{key}']}\n{written}")
        lines.append("")
    return "\n".join(lines)


def _unknown(dotted: str, known: Mapping[str, str]) -> str:
    near = nearest(dotted, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown setting {dotted!r}; {hint}"


def is_run(folder: Path) -> bool:
    """Whether a run folder's settings are those of `hybrid rl`."""
    from hybrid.settings.text import read_toml

    try:
        return "rl" in read_toml(folder / "config.toml", links=False)
    except (OSError, ValueError):
        return False


def check_start(config: RlConfig, ranks: int) -> None:
    """ValueError for what cannot act on so many MPI ranks, 0 where there is no MPI."""
    from hybrid.ranks.starting import check_links  # here, since it brings torch along

    rl, links = config.rl, config.links
    if ranks and rl.blocks not in (0, ranks):
        raise ValueError(f"{rl.blocks} blocks asked of {ranks} MPI ranks: leave --blocks out")
    if max(ranks, rl.blocks) > 2 + rl.actors:
        raise ValueError(too_many(max(ranks, rl.blocks), rl.actors))
    check_links(links, ranks)
    if not ranks:
        links.refuse("links", "there is one process", "timeout")


def _check(config: RlConfig) -> None:
    rl, links = config.rl, config.links
    if rl.steps % rl.actors:
        raise ValueError(
            f"rl.steps is {rl.steps}, which {rl.actors} actors cannot share alike: take "
            f"{max(1, rl.rounds) * rl.actors}"
        )
    if rl.random_rounds >= rl.rounds:
        raise ValueError(
            f"rl.random_steps is {rl.random_steps or rl.random_rounds * rl.actors} of "
            f"{rl.steps} steps in all, which leaves none to learn in: take fewer, or more steps"
        )
    if rl.pretraining and not rl.random_rounds:
        raise ValueError(
            f"rl.pretrain_steps is {rl.pretraining}, with no random steps before to learn from: "
            "take rl.random_steps of at least 1, or rl.pretrain_steps=0"
        )
    if rl.replay_size < rl.actors:
        raise ValueError(
            f"rl.replay_size is {rl.replay_size}, and {rl.actors} actors bring as many transitions "
            f"at once: take at least {rl.actors}"
        )
    if rl.representation and rl.units % rl.layers:
        raise ValueError(
            f"rl.units is {rl.units}, which {rl.layers} layers cannot share alike: take "
            f"{max(1, rl.units // rl.layers) * rl.layers}"
        )
    if not rl.representation:
        names = ("units", "layers", "representation_lr", "pretrain_steps")
        rl.refuse("rl", "there is no representation", *names)
    links.refuse("links", "hybrid rl computes on the CPU", "gpu_aware")


def too_many(ranks: int, actors: int) -> str:
    """What to say of more ranks than there are parts."""
    return (
        f"{ranks} ranks are more than a representation, a learner and {actors} actor(s) can use: "
        f"take {2 + actors} ranks, or --actors {ranks - 2}"
    )
