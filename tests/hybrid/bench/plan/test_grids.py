"""Grids of blocks and replicas on virtual clocks, over units whose time is given."""

from dataclasses import replace

import pytest
import torch
from answers import assert_one_line, output

from hybrid.bench.plan import advice
from hybrid.bench.plan import planner as plan
from hybrid.bench.plan.prediction import best
from hybrid.bench.recipes import BASE, Recipe
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.networks.partition.split import split
from hybrid.networks.units import units
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.local_work.budget import Cost
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training import build

FAST, SLOW = LinkSpeed(1e12, 0.0), LinkSpeed(1e5)


def planner(network=FAST, batch=32, unit=0.001, **settings):
    given = {"data.name": "digits", "data.limit": 512, "train.threads": 1}
    resolved = load(None, {**given, "train.batch_size": batch, **settings})
    images, _ = build.load_own(resolved.data)
    made = plan.Planner(resolved, build.build_model(resolved, images), images, network)
    names = tuple(each.name for each in units(made.model))
    made.timed.times[names] = {n: [Cost(unit, 2 * unit)] * 5 for n in range(1, batch + 1)}
    return made


def weights(made):
    return sum(p.nbytes for p in made.model.parameters())


def test_replicas_take_as_long_as_their_share_and_ranks_never_wait_on_a_fast_network():
    made = planner(unit=0.05)  # next to which no busy machine's own time counts
    rates = [
        made.predict(made.blocks(K, 32), BASE, replicas=R).images_per_second
        for K, R in ((1, 1), (1, 2), (1, 4))
    ]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.1)
    assert rates[2] == pytest.approx(4 * rates[0], rel=0.2)
    delayed = Recipe("ddg", DDG(4))
    alone, two = (made.predict(made.blocks(5, 8), delayed, replicas=R) for R in (1, 2))
    assert two.images_per_second == pytest.approx(2 * alone.images_per_second, rel=0.2)
    assert len(two.idle_share) == 5


def test_bytes_are_those_of_the_cuts_and_of_the_sums_over_replicas(monkeypatch):
    monkeypatch.setattr("hybrid.solvers.peers.COMPARED", False)
    made = planner()
    blocks = split(made.model, cuts=["layer2.0"])
    (shape,) = blocks.cut_shapes(torch.zeros(1, *made.model.input_shape))
    R, cut = 2, 2 * 4 * shape[0] * shape[1] * shape[2]
    recipe = Recipe("exact", Backprop(micro_batches=4))
    # gradients begin at multiples of 64 bytes
    aligned = sum(-(-p.nbytes // 64) * 64 for p in made.model.parameters())
    padded = 2 * (R - 1) * aligned / 32
    # a number a parameter, whether a replica has used it, is never narrower
    used = 2 * (R - 1) * -(-4 * len(list(made.model.parameters())) // 64) * 64 / 32
    found = made.predict(blocks, recipe, replicas=R)
    assert found.bytes_per_image == pytest.approx(cut + padded + used)
    narrow = replace(recipe, sync=AllReduce(messages="bfloat16"))
    found = made.predict(blocks, narrow, replicas=R)
    assert found.bytes_per_image == pytest.approx(cut + padded / 2 + used)
    rarely = made.predict(blocks, replace(recipe, sync=LocalSGD(steps=8)), replicas=R)
    assert rarely.bytes_per_image == pytest.approx(cut + padded / 8)


def test_on_a_slow_network_the_grid_that_sends_less_wins():
    """A cut's activations grow with the mini-batch, gradients of the weights do not."""
    for batch, expected in ((256, (1, 2)), (8, (2, 1))):
        made = planner(SLOW, batch)
        assert best([*made.predictions(made.grids(2), [4])]).grid == expected


@pytest.mark.parametrize(
    ("sync", "copies"),
    [
        *((AllReduce(messages="int8"), 1.5), (LocalSGD(), 0)),
        (DiLoCo(lag=1, messages="bfloat16"), 5.5),
    ],
    ids=str,
)
def test_memory_counts_what_a_strategy_keeps(sync, copies):
    made = planner()
    blocks = made.blocks(1, 16)
    plain, other = (made.memory(blocks, recipe, 2) for recipe in (BASE, replace(BASE, sync=sync)))
    assert other[0] - plain[0] == pytest.approx(copies * weights(made), abs=1)


def test_a_strategy_that_is_asked_for_is_that_of_all_rows_and_its_progress_is_not_known():
    made = planner(SLOW, **{"sync.name": "local-sgd", "sync.steps": 16})
    found = list(made.predictions([Grid(1, 2), Grid(2, 2)], [4]))
    assert {p.recipe.sync for p in found} == {LocalSGD(steps=16)}
    assert {p.progress for p in found} == {None}
    # where all drift apart they are compared as if they did not
    assert best(found).worth == max(p.worth for p in found)
    assert "--set sync.name=local-sgd --set sync.steps=16" in best(found).recipe.flags()


def test_the_advice_names_the_grid_and_is_a_command_that_runs(hybrid, tmp_path):
    made = planner(SLOW, 256)
    found = list(made.predictions(made.grids(2), [4]))
    said = advice.advice(found, made.on_one_rank([4]), made.settings)
    assert "on 2 ranks (--blocks 1 --replicas 2)" in said
    words = advice.command(best(found), made.settings).split()
    assert words[:4] == ["mpirun", "-n", "2", "hybrid"]
    assert "--blocks 1 --replicas 2" in " ".join(words)
    output(hybrid(*words[4:], "--epochs", 1, "--set", "data.limit=256", "--out", tmp_path))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--ranks", "4", "--blocks", "2"), "--ranks 4 stands for every grid"),
        (("--ranks", "997"), "997 ranks cannot form K blocks x R replicas"),
        (("--blocks", "2", "--replicas", "64"), "split.replicas is 64"),
    ],
)
def test_wrong_use_gets_one_line(hybrid, flags, reason):
    words = "plan --data digits --batch-size 32 --set data.limit=64"
    assert_one_line(hybrid(*words.split(), *flags), reason)
