"""Trainings on MPI ranks have the bits of those on threads, and end as they do."""

import re
import shutil
from typing import Any

import measures
import pytest
import torch
from answers import output
from problems import trained_by_hand
from trainings import (
    BATCH,
    assert_same,
    digests,
    digits,
    interrupted,
    network,
    summary,
    trained_weights,
    trainer,
    weights,
)

from hybrid import data
from hybrid.data.sampling import epoch_order
from hybrid.solvers import DDG, FDG, Backprop
from tests.hybrid.training import own_block_program

EPOCHS, STEPS = 2, 6
DECAY = [1 - i / STEPS for i in range(STEPS)]
FLAGS = (
    *("train", "--epochs", EPOCHS, "--batch-size", BATCH, "--set", "train.threads=1"),
    *("--set", f"data.limit={STEPS * BATCH}", "--set", "checkpoint.keep_last=0"),
)
KEPT = (*FLAGS, "--solver", "block-admm", "--window", "all", "--set", "rounds.correct_every=0")


@pytest.fixture(scope="module")
def few():
    return digits(STEPS)[0], data.load("digits")[1]


@pytest.fixture(scope="module")
def by_hand(few):
    """With warm-up, then linear decay."""
    torch.set_num_threads(1)
    train, _ = few

    def steps():
        for epoch, rates in enumerate(([i / STEPS for i in range(1, STEPS + 1)], DECAY)):
            order = epoch_order(0, epoch, len(train)).split(BATCH)
            for ids, rate in zip(order, rates, strict=True):
                yield train.batch(ids, 0, epoch), train.labels[ids], 0.1 * rate

    return trained_by_hand(network().to(memory_format=torch.channels_last), steps())


@pytest.mark.parametrize("blocks", [1, 2, 4, 9])
def test_serial_training_on_threads_equals_a_hand_written_loop(blocks, few, by_hand):
    """Nine blocks are more than there are units."""
    assert_same(trained_weights(trainer(Backprop(), blocks=blocks, inside=True), few), by_hand)


# further methods and rounds: tests/solvers/test_random_layers.py
WAYS: dict[str, tuple[Any, tuple[object, ...], dict[str, Any]]] = {
    "waits": (
        DDG(),
        ("--set", "fill.name=penalty", "--set", "rounds.local_budget=[[8,0],[0,8]]"),
        {"fill": "penalty", "local_budget": [(8, 0), (0, 8)]},
    ),
    "fdg": (FDG(), (), {}),
    "inside a unit": (
        DDG(micro_batches=2),
        ("--set", "solver.micro_batches=2", "--set", 'split.cuts=["layer2.0.conv2"]'),
        {"cuts": ["layer2.0.conv2"]},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_hybrid_under_mpirun_equals_the_hybrid_on_threads(way, world, tmp_path, few):
    solver, flags, settings = WAYS[way]
    out = tmp_path / "run"
    output(world.hybrid(2, *FLAGS, "--solver", solver.name, *flags, "--out", out))
    assert_same(weights(out), trained_weights(trainer(solver, **settings), few))


def test_a_run_of_two_ranks_trains_on_with_three_and_with_one(world, tmp_path, by_hand):
    out = tmp_path / "run"
    output(world.hybrid(2, *FLAGS, "--solver", "backprop", "--out", out))
    assert_same(weights(out), by_hand)
    cuts = ("--set", 'split.cuts=["layer1.0.bn2","layer3.0.conv2"]')  # inside units
    for ranks, flags in ((3, cuts), (1, ())):
        interrupted(out, after=1)
        said = output(world.hybrid(ranks, "train", "--resume", "--out", out, *flags))
        assert re.search("1 replica, cut before .+; the run goes on with 1 replica, cut", said)
        assert summary(out)["blocks"] == ranks
        assert_same(weights(out), by_hand)


def test_a_run_of_threads_goes_on_under_mpirun_and_back_with_the_same_bits(world, hybrid, tmp_path):
    whole, threads, ranks = (tmp_path / name for name in ("whole", "threads", "ranks"))
    output(hybrid(*KEPT, "--blocks", 2, "--out", whole))
    shutil.copytree(whole, threads)
    interrupted(threads, after=1)
    output(world.hybrid(2, "train", "--resume", "--out", threads))
    assert digests(threads) == digests(whole)
    output(world.hybrid(2, *KEPT, "--out", ranks))
    interrupted(ranks, after=1)
    output(hybrid("train", "--resume", "--out", ranks))
    assert digests(ranks) == digests(whole)


def test_a_run_stops_early_on_all_ranks_where_it_does_on_threads(world, hybrid, tmp_path):
    # BatchNorm's statistics move though the weights do not
    still = ("--epochs", 30, "--lr", "1e-12", "--set", "train.early_stop=1")
    ranks, threads = tmp_path / "ranks", tmp_path / "threads"
    output(world.hybrid(2, *FLAGS, *still, "--solver", "backprop", "--out", ranks))
    output(hybrid(*FLAGS, *still, "--solver", "backprop", "--blocks", 2, "--out", threads))
    told = [[summary(run)[key] for key in ("epochs", "stopped_early")] for run in (ranks, threads)]
    assert told[0] == told[1]
    assert told[0][0] < 30
    again = output(world.hybrid(2, "train", "--resume", "--out", ranks))
    assert (
        f"has ended after {told[0][0]} epochs (train.early_stop: no better test accuracy" in again
    )


@pytest.mark.parametrize("hook", ["on_start", "on_report", "state"])
def test_an_exception_in_a_callback_of_the_first_rank_ends_all(hook, world, tmp_path):
    said = world.run(2, "callback_program:failed", hook, tmp_path / "run")
    assert said == [f"callback Failing failed in {hook}: out of luck"] * 2


@pytest.mark.parametrize(("blocks", "replicas"), [(2, 2)])
def test_metrics_that_are_no_means_are_on_ranks_what_they_are_on_threads(blocks, replicas, world):
    first, *others = world.train(blocks * replicas, "measures:measured", blocks, replicas)
    assert first == measures.measured(blocks, replicas)
    assert all(other[:2] == first[:2] for other in others)


def test_a_rank_holds_its_own_block_with_the_bits_of_one_process(world) -> None:
    ranks = world.run(4, "tests.hybrid.training.own_block_program:on_a_rank")
    small = own_block_program.LAYERS * own_block_program.WIDTH * 4
    assert all(own <= held < own + 2 * small for held, own, _ in ranks)
    found = {name: digest for _, _, digests in ranks for name, digest in digests.items()}
    assert found == own_block_program.trained(1)
