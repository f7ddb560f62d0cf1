"""A method, a sampler, a strategy by name or as an object."""

import pytest
import torch
from answers import refusal

from hybrid.method.options import Options
from hybrid.settings.config import OptimizerSettings
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, Backprop, Penalty
from hybrid.solvers.local_work.work import NoLocalWork
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid_samplers import AutoAssist


def test_what_has_settings_is_given_by_name_or_as_an_object():
    assert Options("ddg").solver == Options(DDG()).solver == Options().solver == DDG()
    assert Options("ddg").fill == NoLocalWork()
    assert Options("ddg", fill="penalty").fill == Options(fill=Penalty()).fill == Penalty()
    made = Options("ddg", sampler="auto-assist", sync="diloco", correction=Backprop())
    assert (made.sampler, made.sync, made.correction) == (AutoAssist(), DiLoCo(), Backprop())


@pytest.mark.parametrize("asked", [Options, lambda name: load(None, {"solver.name": name})])
def test_letters_that_are_swapped_are_seen(asked):
    assert refusal(asked, "ddgg") == "unknown solver 'ddgg'; did you mean 'ddg'?"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"solver": 3}, ("solver is 3, no Solver", "the name of one")),
        ({"solver": DDG}, ("DDG'>, no Solver", "give an object", "hybrid.solvers.base.Solver")),
        ({"sync": 0.5}, ("sync is 0.5, no Strategy",)),
        ({"correction": DDG()}, ("no PassSettings: give an object",)),
    ],
    ids=str,
)
def test_what_is_none_of_the_kind_is_refused_in_a_sentence(given, parts):
    said = refusal(Options, **given)
    assert [part for part in parts if part not in said] == []


def test_settings_are_an_object_a_dict_or_a_name():
    train = {"epochs": 3, "precision": "bfloat16"}
    made = Options(train=train, optimizer="AdamW", schedule="cosine", links="virtual")
    assert (made.train.epochs, made.train.precision) == (3, "bfloat16")
    assert made.optimizer == OptimizerSettings(name="adamw", lr=1e-3)
    assert (made.schedule.name, made.links.kind) == ("cosine", "virtual")
    made.optimizer = torch.optim.AdamW
    assert made.optimizer is torch.optim.AdamW


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "AdaW"}, "optimizer.name is 'AdaW'; it must be one of sgd, adamw, "),
        ({"train": {"epoch": 1}}, "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        ({"train": 3}, "train is 3; it must be TrainSettings(...) or a dict of its settings"),
        ({"schedule": 3}, "schedule is 3; it must be ScheduleSettings(...) or a dict of its "),
        ({"checkpoint": "often"}, "checkpoint is 'often'; it must be CheckpointSettings(...) or "),
    ],
)
def test_what_are_no_settings_is_told_in_one_line(given, said):
    assert refusal(Options, **given).startswith(said)
