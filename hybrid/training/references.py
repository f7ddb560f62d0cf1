"""Functions of a user's own, named package.module:function on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from hybrid.errors import one_line
from hybrid.settings.config import Config
from hybrid.settings.sections.base import is_reference
from hybrid.solvers.blocks.metrics import Accumulating, Metric
from hybrid.solvers.checks import nearest

FLAGS = {"model.name": "--model", "data.name": "--data", "train.loss": "--loss"}
"""The settings that may name one, and the flags that do."""


def check_code_is_given(config: Config, given: Mapping[str, Any]) -> None:
    """ValueError for a function that a file names: it runs only if the command line does."""
    for dotted, flag in FLAGS.items():
        section, _, key = dotted.partition(".")
        name = getattr(getattr(config, section), key)
        if is_reference(name) and given.get(dotted) != name:
            raise ValueError(
                f"{dotted} is {name!r}, code that would run, and a file says so: give {flag} "
                f"{name} on the command line to run it"
            )


def load_function(name: str, flag: str) -> Any:
    """The function so named; ValueError with the reason."""
    found = load_object(name, flag)
    if not callable(found):
        attribute = name.partition(":")[2]
        raise ValueError(f"{flag} {name}: {attribute} is a {type(found).__name__}, no function")
    return found


def load_object(name: str, flag: str) -> Any:
    """What has that name in the current folder or installed; ValueError with the reason."""
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        why = f"{type(error).__name__}: {one_line(error)}"
        if module.endswith(".py"):
            why = f"it is the name of a file: give {flag} {module[:-3]}:{attribute}"
        raise ValueError(f"{flag} {name}: {module} cannot be imported: {why}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = nearest(part, dir(found), 0.6)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{flag} {name}: {module} has no {attribute}{hint}")
        found = getattr(found, part)
    return found


def call_function(name: str, flag: str) -> Any:
    """What the function gives without arguments; ValueError with the reason."""
    made = load_function(name, flag)
    try:
        return made()
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ValueError(
            f"{flag} {name} failed: {type(error).__name__}: {one_line(error)}"
        ) from None


def make_network(name: str) -> nn.Module | list[tuple[str, nn.Module]]:
    """The network that --model names: a module, or a list of (name, module)."""
    made = call_function(name, "--model")
    if not isinstance(made, nn.Module | list):
        raise ValueError(
            f"--model {name} gave a {type(made).__name__}, not a torch.nn.Module or a list of "
            "(name, module)"
        )
    return made


def make_data_sets(name: str) -> tuple[Any, Any]:
    """The data sets that --data names: one to train on, one to test on."""
    made = call_function(name, "--data")
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise ValueError(f"--data {name} gave a {type(made).__name__}, not (training, test) data")
    return made[0], made[1]


def load_loss(name: str) -> Any:
    """The loss that --loss names; None: one of this package's."""
    return load_function(name, "--loss") if is_reference(name) else None


def load_metrics(given: Sequence[str]) -> dict[str, Metric] | None:
    """Those of --metric NAME=MODULE:OBJECT, by name; None without any: this package's."""
    found: dict[str, Metric] = {}
    for text in given:
        name, _, reference = text.partition("=")
        if not (name and is_reference(reference)):
            raise ValueError(
                f"--metric is {text!r}: write NAME=MODULE:OBJECT, as in F1=own:macro_f1"
            )
        if name in found:
            raise ValueError(f"--metric {name} is given twice: give each its own name")
        made = load_object(reference, "--metric")
        if not (callable(made) or isinstance(made, Accumulating)):
            raise ValueError(
                f"--metric {text}: it is a {type(made).__name__}, neither a function of (output, "
                "targets) nor an object with update, compute and reset"
            )
        found[name] = made
    return found or None
