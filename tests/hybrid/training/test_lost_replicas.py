"""What is left when replicas go: a run that goes on on fewer, one that ends or diverges as one."""

import math

import pytest
import torch
from answers import output
from trainings import (
    BATCH,
    OFTEN,
    assert_same,
    digits,
    interrupted,
    summary,
    trained_weights,
    trainer,
)

from hybrid.errors import AgreedError
from hybrid.folder.checkpoint import complete
from hybrid.links.threads import run_threads
from hybrid.rounds.base import Rounds
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.hpsgd import HPSGD
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training.rank_training import RankTraining

SYNCS = {
    "all-reduce": AllReduce(),
    "local-sgd": LocalSGD(steps=3),
    "diloco": DiLoCo(steps=3, lag=1),
    "hpsgd": HPSGD(steps=3, lag=2),
}
FLAGS = (
    *("train", "--epochs", 2, "--batch-size", BATCH, "--set", "train.threads=1"),
    *("--set", f"data.limit={4 * BATCH}", "--set", "checkpoint.keep_last=0"),
    *("--solver", "backprop", "--replicas", 2),
)
STEP = 6
"""Of the second epoch, in the middle of a round, whatever the strategy."""


def words(sync):
    flags = [f"sync.{k}={v}" for k, v in vars(sync).items()]
    return [word for flag in [f"sync.name={sync.name}", *flags] for word in ("--set", flag)]


@pytest.fixture(scope="module")
def few():
    return digits(4)


def test_one_replica_goes_on_without_what_kept_two_together(hybrid, tmp_path):
    sync, out = "diloco", tmp_path / "run"
    side = ("--set", "split.side_by_side=peers")
    output(hybrid(*FLAGS, *words(SYNCS[sync]), *side, "--blocks", 2, "--out", out))
    interrupted(out, after=1)
    said = output(hybrid("train", "--resume", "--replicas", 1, "--out", out))
    assert f"2 replicas, kept together by {sync}, go on as 1" in said
    assert (summary(out)["blocks"], summary(out)["replicas"], summary(out)["sync"]) == (2, 1, "")
    interrupted(out, after=1)
    again = hybrid("train", "--resume", "--replicas", 2, *words(SYNCS[sync]), "--out", out)
    output(again)
    assert (summary(out)["replicas"], summary(out)["sync"]) == (2, sync)


def test_fewer_ranks_go_on_where_they_are_a_grid(world, hybrid, tmp_path):
    out = tmp_path / "run"
    output(hybrid(*FLAGS, *words(SYNCS["diloco"]), "--blocks", 2, "--out", out))
    interrupted(out, after=1)
    status, _, err = world.hybrid(3, "train", "--resume", "--out", out)
    assert status
    assert err.count("hybrid: error:") == 1
    assert "2 blocks x 2 replicas, and 3 ranks are a multiple of neither" in err
    assert "start mpirun -n 2 or a multiple of it" in err
    another = ("train", "--resume", "--out", out)
    assert "2 replicas, kept together by diloco, go on as 1" in output(world.hybrid(2, *another))
    assert (summary(out)["blocks"], summary(out)["replicas"]) == (2, 1)
    assert int(complete(out / "checkpoints")[-1].name) == 2 * 4


@pytest.mark.parametrize("begun", [(0, 0), (1, 3)])
def test_exchanges_are_dropped_also_where_replicas_have_begun_other_numbers(begun):
    def program(links):
        peers, mine = links.peers, torch.tensor([float(links.place.number)])
        for _ in range(begun[peers.replica]):
            peers.exchange([mine, mine])
        peers.drop()
        return [float(t) for t in peers.exchange([mine, mine])()]

    assert run_threads(2, program, replicas=2) == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_spoilt_sample_of_any_replica_is_named(replicas, few):
    train, test = ((data.images / 255.0, data.labels) for data in few)
    train[0][77] = math.nan
    with pytest.raises(AgreedError, match="the input of sample 77 has nan in it"):
        trainer(Backprop(), replicas=replicas).fit(train, test)


@pytest.mark.parametrize(("replica", "sync"), [*enumerate(SYNCS)])
def test_a_grid_goes_back_into_a_round_on_all_ranks_alike(
    replica, sync, few, tmp_path, monkeypatch
):
    """One replica diverges while sums are under way; with the old rates it changes no bit."""
    replica %= 2
    monkeypatch.setattr("hybrid.solvers.sync.base.COMPARED", False)  # or that would be noticed
    monkeypatch.setattr("hybrid.method.settle.WINDOW", 1)  # or reports wait for its end
    settings = {"replicas": 2, "sync": SYNCS[sync], "train": {"report_every": 1}}
    solver = DDG() if SYNCS[sync].exact else Backprop()
    expected = trained_weights(trainer(solver, **settings), few)
    monkeypatch.setattr(RankTraining, "take_smaller_steps", lambda _: None)
    plain, spoilt = Rounds.run, set()

    def run(self, windows, first_step, epoch, closing=None):
        mine = self.links.place.number
        if first_step == STEP and mine == 2 * replica and mine not in spoilt:
            spoilt.add(mine)
            next(self.exact.block.module.parameters()).data.fill_(math.nan)
        return plain(self, windows, first_step, epoch, closing)

    monkeypatch.setattr(Rounds, "run", run)
    found = trained_weights(trainer(solver, tmp_path / "run", checkpoint=OFTEN, **settings), few)
    (told,) = summary(tmp_path / "run")["rollbacks"]
    assert told["to"] == STEP
    assert_same(found, expected)


def test_a_rate_that_is_hopeless_is_said_once_by_a_grid(world, hybrid, tmp_path):
    """About 3 s: a grid of ranks and one of threads."""
    wild = (*FLAGS, *words(SYNCS["diloco"]), "--lr", "1e9", "--blocks", 1, "--out")
    said = []
    for status, out, err in (
        world.hybrid(2, *wild, tmp_path / "ranks"),
        hybrid(*wild, tmp_path / "threads"),
    ):
        assert status == 1
        assert err.count("hybrid: error:") == 1
        assert "3 roll-backs did not help" in err
        assert out.count("going on from the checkpoint of step 0") == 3
        said.append(err.replace("ranks", "threads"))
    assert said[0] == said[1]
