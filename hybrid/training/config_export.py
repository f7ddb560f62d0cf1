"""The settings of a training as the text of its config.toml."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.method.method import Method
from hybrid.settings import methods
from hybrid.settings.config import Config, Section
from hybrid.settings.resolve import to_toml
from hybrid.solvers import registry
from hybrid.training.options import RunOptions

OWN_LOSS = "your own"
"""The name that the file has for a loss of the caller's own."""

OWN_DATA = "custom"
"""The name of data that were given to `fit`."""


def make_config_text(options: RunOptions, method: Method, cuts: Sequence[str]) -> str:
    """Text of config.toml; objects of the caller's, which no file can hold, are only mentioned."""
    name = method.solver.name
    notes = ["# a run of the library"]
    if name not in registry.names() or registry.solver_class(name) is not type(method.solver):
        notes.append(f"# the solver is the caller's own: {type(method.solver).__name__}")
        return "\n".join([*notes, f"# cuts = {list(cuts)}\n"])
    tables = {
        "model": {"name": options.names["model"]},
        "data": {"name": options.names["data"]},
        "solver": {"name": name, **methods.values(method.solver)},
        "correction": methods.values(method.correction),
        "rounds": method.rounds.model_dump(),
        "split": {"blocks": len(cuts) + 1, "cuts": list(cuts), "replicas": options.replicas},
    }
    for section, known in methods.NAMED.items():
        made = getattr(options, section)
        if made.name in known and known[made.name] is type(made):
            tables[section] = {"name": made.name, **methods.values(made)}
        else:
            notes.append(f"# the {known.kind} is the caller's own: {made.name}")
    for section in ("train", "optimizer", "schedule", "delay", "links", "checkpoint"):
        value = getattr(options, section)
        if isinstance(value, Section):
            tables[section] = value.model_dump()
            if section == "train" and options.loss is not None:
                tables[section]["loss"] = OWN_LOSS
        else:
            notes.append(f"# [{section}] is a function of the caller's, not what stands below")
    for option in ("loss", "metrics", "batch_transform"):
        if getattr(options, option) is not None:
            notes.append(f"# {option} is the caller's own")
    return "\n".join([*notes, to_toml(Config.model_validate(tables))])
