"""Strategies and samplers of other packages are named in settings like this package's own."""

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from typing import ClassVar

import pytest
from answers import refusal
from trainings import digits, trainer

from hybrid.data.samplers.uniform import Uniform
from hybrid.registries import SAMPLERS
from hybrid.settings import methods
from hybrid.settings.resolve import resolve
from hybrid.solvers import Backprop, named
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.all_reduce import AllReduce


@dataclass(frozen=True)
class Mine(AllReduce):
    name: ClassVar[str] = "mine"
    strength: int = 3
    """How strongly replicas agree."""


@dataclass(frozen=True)
class Same(Uniform):
    name: ClassVar[str] = "same"


@pytest.fixture(autouse=True)
def another_package(monkeypatch):
    points = EntryPoints(
        [
            EntryPoint("mine", "theirs:Mine", STRATEGIES.group),
            EntryPoint("same", "theirs:Same", SAMPLERS.group),
        ]
    )
    monkeypatch.setitem(sys.modules, "theirs", sys.modules[__name__])
    monkeypatch.setattr(named, "entry_points", lambda group: points.select(group=group))


def test_they_are_made_with_their_settings_and_train():
    config = resolve({"sync": {"name": "mine", "strength": 4}, "sampler": {"name": "same"}})
    assert methods.sync(config) == Mine(strength=4)
    assert methods.named(config, "sampler") == Same()
    made = trainer(Backprop(), blocks=1, replicas=2, sync="mine", sampler="same")
    assert made.fit(*digits(2))["sync"] == "mine"


def test_a_setting_of_theirs_is_known_to_be_theirs():
    said = refusal(resolve, {"sync": {"strength": 4}})
    assert said == "sync.strength is a setting of mine; this run's sync.name is all-reduce"
