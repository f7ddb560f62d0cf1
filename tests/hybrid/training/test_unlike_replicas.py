"""Replicas that differ, in what they use or within a round; grids that lose some, or diverge."""

import math
from itertools import count

import pytest
import torch
from answers import output
from torch import nn
from trainings import (
    BATCH,
    OFTEN,
    assert_same,
    digits,
    interrupted,
    stopped,
    summary,
    trained_weights,
    trainer,
    trainer_of,
)

from hybrid.folder.checkpoint import complete
from hybrid.rounds.base import Rounds
from hybrid.settings.config import ScheduleSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, Petra
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training.rank_training import RankTraining


@pytest.fixture(scope="module")
def few():
    return digits(4)


class Routed(nn.Module):
    """One of two layers, as the samples want it, or none of its third."""

    def __init__(self, sizes):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, n) for n in sizes)

    def forward(self, x):
        chosen = self.a(x) if x[0, 0] > 0 else self.b(x)
        return chosen[:, :3]


@pytest.mark.parametrize(
    "sizes", [(3, 3, 3), (3, 5, 3)], ids=["branches", "branches of other sizes"]
)
def test_two_replicas_have_the_bits_of_one_chain_of_two_parts(sizes):
    """With weight decay, which moves what has a gradient, even 0, and nothing else."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    found = []
    for replicas, solver in ((1, Backprop(micro_batches=2)), (2, Backprop())):
        torch.manual_seed(1)
        model = nn.Sequential(Routed(sizes))
        train = {"batch_size": 8, "verify": "never"}  # its paths depend on the mini-batch
        made = trainer_of(model, solver, replicas=replicas, train=train)
        made.fit((x, y), (x, y))
        found.append({k: v.clone() for k, v in model.state_dict().items()})
    assert_same(*found)


UNEVEN = {
    "ddg": (DDG(), 2, {"train": {"batch_size": 63}}),
    "fdg": (FDG(micro_batches=4), 2, {"train": {"batch_size": 7}}),
    "petra": (Petra(micro_batches=4), 2, {"train": {"batch_size": 7}}),
    "waits": (
        DDG(micro_batches=2),
        2,
        {
            "train": {"batch_size": 17},
            "fill": AugmentedLagrangian(),
            "local_budget": [(2, 2), (0, 4), (0, 3)],
        },
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_replicas_whose_shares_differ_by_a_sample_stay_equal(name):
    """Their bits are compared after every step; what counts samples is the same on all of them."""
    solver, replicas, settings = UNEVEN[name]
    torch.manual_seed(0)
    size = 6 * settings["train"]["batch_size"]
    x, y = torch.randn(size, 12), torch.randint(0, 3, (size,))
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)), nn.Linear(12, 3))
    schedule = ScheduleSettings(name="linear", warmup_epochs=1)
    cuts = {"cuts": ["1", "2"], "replicas": replicas, "schedule": schedule}
    trainer_of(model, solver, **cuts, **settings).fit((x, y), (x, y))


def test_replicas_that_part_are_noticed_at_once():
    class Drifting(torch.optim.SGD):
        """Steps on every second replica a little further."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 1 + 1e-6 * (self.number % 2)
            return super().step(closure)

    numbers = count()

    def drifting(groups):
        made = Drifting(groups, lr=0.1)
        made.number = next(numbers)
        return made

    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    made = trainer_of(nn.Sequential(nn.Linear(8, 3)), Backprop(), replicas=2, optimizer=drifting)
    with pytest.raises(RuntimeError, match="block 0 differ between replicas 0 and 1 after its ste"):
        made.fit((x, y), (x, y))


def test_a_round_is_told_of_that_another_strategy_does_not_take_up(
    few, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)
    run = tmp_path / "run"
    late = {"replicas": 2, "train": {"report_every": 1}, "checkpoint": OFTEN, "model": "plain"}
    trained_weights(trainer(Backprop(), run, sync=DiLoCo(steps=3, lag=2), **late), few)
    stopped(run, 7)  # in the second epoch, a round under way
    again = trainer(Backprop(), run, sync=AllReduce(), resume=True, **late)
    again.options.quiet = False
    again.fit(*few)
    assert "what backprop had under way is dropped" in capsys.readouterr().out


def test_the_network_is_left_as_it_was_tested(few):
    """Within a round: the mean of the replicas, of which the summary tells the accuracy."""
    made = trainer(Backprop(), blocks=1, replicas=2, sync=LocalSGD(steps=100))
    tested = made.fit(*few)["test_accuracy"]
    model = made.blocks.model.eval()
    ids = torch.arange(len(few[1]))
    found = model(few[1].batch(ids, seed=0, epoch=0, augment=False)).argmax(1)
    assert (found == few[1].targets(ids)).double().mean().item() == pytest.approx(tested)


def test_replicas_of_a_script_that_seeds_nothing_start_with_the_weights_of_the_first(world):
    """Each rank has built another network, as the ranks' own seeds have it."""
    found = world.run(3, "samples:trained_unseeded")
    assert found[0] == found[1] == found[2]


SYNCS = {
    "all-reduce": AllReduce(),
    "local-sgd": LocalSGD(steps=3),
    "diloco": DiLoCo(steps=3, lag=1),
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


def test_one_replica_goes_on_without_what_kept_two_together(hybrid, tmp_path):
    sync, out = "diloco", tmp_path / "run"
    side = ("--set", "split.side_by_side=peers")
    output(hybrid(*FLAGS, *words(SYNCS[sync]), *side, "--blocks", 2, "--out", out))
    interrupted(out, after=1)
    said = output(hybrid("train", "--resume", "--replicas", 1, "--out", out))
    assert "the run goes on with 1 replica, cut before" in said
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
    assert "the run goes on with 1 replica" in output(world.hybrid(2, *another))
    assert (summary(out)["blocks"], summary(out)["replicas"]) == (2, 1)
    assert int(complete(out / "checkpoints")[-1].name) == 2 * 4


@pytest.mark.parametrize(("replica", "sync"), [*enumerate(SYNCS)])
def test_a_grid_goes_back_into_a_round_on_all_ranks_alike(
    replica, sync, few, tmp_path, monkeypatch
):
    """One replica diverges while sums are under way; with the old rates it changes no bit."""
    replica %= 2
    monkeypatch.setattr("hybrid.solvers.peers.COMPARED", False)  # or that would be noticed
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)  # or reports wait for its end
    settings = {"replicas": 2, "sync": SYNCS[sync], "train": {"report_every": 1}}
    solver = DDG() if SYNCS[sync].exact else Backprop()
    expected = trained_weights(trainer(solver, **settings), few)
    monkeypatch.setattr(RankTraining, "take_smaller_steps", lambda _: None)
    plain, spoilt = Rounds.run, set()

    def run(self, windows, first_step, epoch, bn_recalibration=None):
        mine = self.links.place.number
        if first_step == STEP and mine == 2 * replica and mine not in spoilt:
            spoilt.add(mine)
            next(self.exact.block.module.parameters()).data.fill_(math.nan)
        return plain(self, windows, first_step, epoch, bn_recalibration)

    monkeypatch.setattr(Rounds, "run", run)
    found = trained_weights(trainer(solver, tmp_path / "run", checkpoint=OFTEN, **settings), few)
    (told,) = summary(tmp_path / "run")["rollbacks"]
    assert told["to"] == STEP
    assert_same(found, expected)
