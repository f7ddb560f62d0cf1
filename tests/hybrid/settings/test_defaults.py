"""One truth for defaults: the command, its help, the written file, the library and README agree."""

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import typer
from torch import nn

from hybrid import Trainer, split
from hybrid.cli import options
from hybrid.cli.app import app
from hybrid.method.options import Options
from hybrid.networks import models
from hybrid.settings.config import Config, RoundSettings, SplitSettings, declared_settings
from hybrid.settings.resolve import load
from hybrid.solvers import registry
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.training.build import build_options

ROUNDS: list[dict[str, Any]] = [
    {},
    {"window": 4},
    {"sweeps": 2},
    {"window": "all", "correct_every": 0},
    {"correct_every": 2},
    {"serial_end": True, "window": 2},
]


def flags():
    """Every "section.key" that is a flag of `hybrid train`, and the help it prints."""
    command = typer.main.get_command(app).get_command(None, "train")
    return {options.FLAGS[p.name]: p.help for p in command.params if p.name in options.FLAGS}


def test_the_library_has_the_defaults_of_the_declarations():
    options = {f.name: f for f in fields(Options)}
    for name, declared in RoundSettings.model_fields.items():
        assert options[name].default == declared.default, name
    blocks = split(nn.Sequential(nn.Linear(2, 2)), blocks=1)
    one, other = Trainer(blocks).options, Trainer(blocks).options
    for section in ("train", "optimizer", "schedule", "links", "checkpoint"):
        assert getattr(one, section) == getattr(Config(), section)
        assert getattr(one, section) is not getattr(other, section)


def commanded(solver, asked):
    config = load(None, {"solver.name": solver, **{f"rounds.{k}": v for k, v in asked.items()}})
    made = build_options(config)
    return made.rounds, made.correction


def programmed(solver, asked):
    blocks = split(models.build("resnet8", 4, 1, 4), blocks=2, balance="even")
    trainer = Trainer(blocks, registry.solver_class(solver)(), **asked)
    assert trainer.options.correction is not None
    return trainer.options.rounds, trainer.options.correction


@pytest.mark.parametrize("solver", registry.names())
@pytest.mark.parametrize("asked", ROUNDS, ids=str)
def test_rounds_mean_the_same_in_the_command_and_in_the_library(solver, asked):
    found = []
    for way in (commanded, programmed):
        try:
            rounds, correction = way(solver, asked)
            passes = {f.name: getattr(correction, f.name) for f in fields(PassSettings)}
            found.append((rounds, passes))
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_help_shows_the_defaults_and_what_unset_means():
    known, defaults = declared_settings(), Config().model_dump()
    assert len(flags()) > 10
    for dotted, text in flags().items():
        section, _, key = dotted.partition(".")
        default = defaults[section][key]
        assert text.startswith(known[dotted])
        assert not default or f"[default: {default}]" in text
        assert default is not None or "unset: " in text


def test_two_equal_calls_of_split_cut_alike(monkeypatch):
    def timed(*arguments):
        raise AssertionError("a time differs from call to call")

    monkeypatch.setattr("hybrid.networks.partition.split.measure_costs", timed)
    model = models.build("resnet20", 10, 1, 8)
    assert split(model, blocks=4).starts == split(model, blocks=4).starts
    assert signature(split).parameters["balance"].default == SplitSettings().balance
