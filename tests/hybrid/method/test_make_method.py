"""One function settles a method, with the same refusals for a run, a bench and a plan."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from answers import refusal
from trainings import digits

from hybrid import OptimizerSettings, Trainer, TrainSettings, split
from hybrid.bench.recipes import Recipe
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.networks import models
from hybrid.settings.config import RoundSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Penalty
from hybrid.solvers.sync.local_sgd import LocalSGD

HYBRID = Path(__file__).parents[3] / "hybrid"


def test_one_function_builds_what_solvers_are_set_up_by():
    builders = {
        path.relative_to(HYBRID).as_posix()
        for path in HYBRID.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Setup"
    }
    assert builders == {"method/make_method.py"}


@pytest.fixture(scope="module")
def given():
    return digits(3)


def blocks():
    return split(models.build("resnet8", 10, 1, 8), 2, balance="even")


def test_local_work_that_fits_is_that_of_the_machines_speeds(given):
    def costs(speeds):
        made = replace(blocks(), speeds=speeds)
        train = TrainSettings(batch_size=32)
        return Trainer(made, DDG(4), fill=Penalty(), train=train).make_method(given[0]).costs

    alike, unlike = costs(()), costs((2.0, 0.5))
    assert [sum(a) / sum(b) for a, b in zip(alike, unlike, strict=True)] == [2.0, 0.5]


@pytest.mark.parametrize(
    ("solver", "rounds", "options"),
    [
        (AugmentedLagrangian(beta=0.5), {"window": 4, "memory_gb": 1e-6}, {}),
        (DDG(4), {}, {"fill": Penalty(), "train": {"precision": "float16"}}),
        (DDG(4), {"local_budget": [(8, 0)]}, {"fill": Penalty()}),
        (AugmentedLagrangian(lam_step=0.5), {"window": 4}, {}),
        (DDG(4), {}, {"sync": LocalSGD(), "replicas": 2, "train": {"ema": 0.9}}),
        (DDG(4), {}, {"replicas": 64}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_run_and_a_row_are_refused_for_the_same_reason(given, solver, rounds, options):
    known = {**options, "train": TrainSettings(batch_size=32, **options.get("train", {}))}
    trainer = Trainer(blocks(), solver, **rounds, **known, optimizer=OptimizerSettings(lr=0.01))
    reason = refusal(trainer.make_method, given[0])
    made = Options(
        **{key: value for key, value in known.items() if key not in ("sync", "replicas", "fill")}
    )
    recipe = Recipe("row", solver, trainer.options.correction, RoundSettings(**rounds))
    recipe = replace(recipe, **{k: v for k, v in known.items() if k in ("sync", "fill")})
    problem = Problem.of(made, blocks(), given[0])
    assert refusal(recipe.method, problem, made, known.get("replicas", 1)) == reason
