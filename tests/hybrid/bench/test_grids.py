"""Rows of a bench on grids of blocks and replicas."""

from types import SimpleNamespace

import pytest
import torch
from baselines_program import batches, network

from hybrid.bench.comparison import Bench
from hybrid.bench.recipes import MethodContender, Recipe
from hybrid.cuts.partition import split
from hybrid.data import load as load_data
from hybrid.links import run_threads
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.settings.config import TrainSettings
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.sync.local_sgd import LocalSGD


def rows(tmp_path, ranks, **given):
    settings = load(None, {"model.name": "resnet8", "data.limit": 64, **given})
    comm = SimpleNamespace(rank=0, size=ranks)
    own = Bench(comm, settings, [4, 8], [], tmp_path / "bench").own
    return {name: (grid, recipe.sync.name) for name, (recipe, grid) in own.items()}


def replicated(found):
    return [name for name, (grid, _) in found.items() if grid.replicas > 1]


def test_ranks_have_a_few_rows_for_each_of_their_grids(tmp_path):
    given = {"train.batch_size": 64}
    assert replicated(rows(tmp_path, 4, **given)) == [
        "backprop, m=4, 2 blocks x 2 replicas, all-reduce",
        "ddg, m=4, 2 blocks x 2 replicas, all-reduce",
        "backprop, m=1, 4 replicas, all-reduce",
    ]
    assert len(replicated(rows(tmp_path, 16, **given))) == 7
    # a share of 4 images is not cut in 4 parts
    assert len(replicated(rows(tmp_path, 16, **{"train.batch_size": 24}))) == 5


def test_a_grid_and_a_strategy_that_are_asked_for_are_those_of_the_rows(tmp_path):
    given = {"train.batch_size": 64, "split.blocks": 2, "split.replicas": 4}
    found = rows(tmp_path, 8, **given, **{"sync.name": "local-sgd"})
    assert {found[name] for name in replicated(found)} == {((2, 4), "local-sgd")}


def trained(recipe, K, R):
    """The state after two mini-batches, and who gives it."""
    options = Options(train=TrainSettings(batch_size=32))
    problem = Problem.of(options, split(network(), K), *load_data("digits"))
    method = recipe.method(problem, options, R)

    def program(links):
        row = MethodContender(method, links)
        row.train(batches())
        return row.state_dict()

    whole, *others = run_threads(K, program, replicas=R)
    assert others == [None] * (K * R - 1)
    return {k: v for k, v in whole.items() if "running" not in k and "num_batches" not in k}


@pytest.mark.parametrize(("K", "R"), [(1, 2), (2, 2), (1, 3)])
def test_a_row_of_replicas_has_the_weights_of_a_row_that_accumulates(K, R):
    found = trained(Recipe("exact", Backprop()), K, R)
    expected = trained(Recipe("exact", Backprop(micro_batches=R)), K, 1)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rows_of_delays_and_of_replicas_that_drift_train_too():
    for recipe in (Recipe("ddg", DDG(4)), Recipe("drifting", Backprop(), sync=LocalSGD())):
        assert all(torch.isfinite(w).all() for w in trained(recipe, 2, 2).values())
