"""Rows of a bench on grids of blocks and replicas."""

from types import SimpleNamespace

import pytest
import torch

from hybrid.bench.bench import Bench
from hybrid.bench.contenders import MethodContender
from hybrid.bench.recipes import Recipe
from hybrid.data import load as load_data
from hybrid.links import run_threads
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.networks.partition.split import split
from hybrid.settings.config import TrainSettings
from hybrid.settings.resolve import load
from hybrid.solvers import Backprop
from tests.hybrid.bench.baselines_program import batches, network, state


def rows(tmp_path, ranks, **given):
    settings = load(None, {"model.name": "resnet8", "data.limit": 64, **given})
    comm = SimpleNamespace(rank=0, size=ranks)
    return Bench(comm, settings, [4, 8], [], tmp_path / "bench")


def test_rows_are_of_the_grid_that_is_asked_for_and_of_the_undivided_network(tmp_path):
    given = {"train.batch_size": 16, "sync.name": "local-sgd"}
    made = rows(tmp_path, 4, **given)
    (whole,) = (name for name, (_, grid) in made.recipes.items() if grid.replicas > 1)
    assert whole == "backprop, m=1, 4 replicas, local-sgd"
    assert {grid for _, grid in made.recipes.values()} == {(4, 1), (1, 4)}
    made = rows(tmp_path, 8, **given, **{"split.blocks": 2, "split.replicas": 4})
    assert {grid for _, grid in made.recipes.values()} == {(2, 4), (1, 8)}
    assert {recipe.sync.name for recipe, _ in made.recipes.values()} == {"local-sgd"}
    # a share of 4 images is not cut in 8 parts
    left = made.left_out["backprop, m=8, 2 blocks x 4 replicas, local-sgd"]
    assert left == "a mini-batch has 4 samples"


def trained(recipe, K, R):
    """The state after two mini-batches, and who gives it."""
    options = Options(train=TrainSettings(batch_size=32))
    problem = Problem.of(options, split(network(), K), *load_data("digits"))
    method = recipe.method(problem, options, R)

    def program(links):
        row = MethodContender(method, links)
        row.train(batches())
        return state(row)

    whole, *others = run_threads(K, program, replicas=R)
    assert others == [None] * (K * R - 1)
    return {k: v for k, v in whole.items() if "running" not in k and "num_batches" not in k}


@pytest.mark.parametrize(("K", "R"), [(1, 2), (2, 2), (1, 3)])
def test_a_row_of_replicas_has_the_weights_of_a_row_that_accumulates(K, R):
    found = trained(Recipe("exact", Backprop()), K, R)
    expected = trained(Recipe("exact", Backprop(micro_batches=R)), K, 1)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
