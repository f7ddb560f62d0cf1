"""Replicas that differ, in what they use or within a round; grids that go on as another."""

import shutil
from itertools import count

import pytest
import torch
from torch import nn
from trainings import (
    OFTEN,
    assert_same,
    digits,
    interrupted,
    stopped,
    trained_weights,
    trainer,
    trainer_of,
)

from hybrid.settings.config import ScheduleSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, Petra
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.hpsgd import HPSGD
from hybrid.solvers.sync.local_sgd import LocalSGD


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


def test_a_round_under_way_goes_on_with_what_each_replica_has_used(tmp_path, monkeypatch):
    """Of two branches a round may have used one, which alone steps when it lands."""
    monkeypatch.setattr("hybrid.method.settle.WINDOW", 1)  # or reports wait for its end
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
    x[:, 0] = x[:, 0].abs() - 0.3  # so that some rounds use the first branch alone

    def trained(out, **settings):
        torch.manual_seed(1)
        model = nn.Sequential(Routed((3, 3, 3)))
        made = trainer_of(
            model,
            replicas=2,
            sync=HPSGD(steps=2, lag=2),
            train={"batch_size": 8, "report_every": 1},
            checkpoint=OFTEN,
            out=out,
            **settings,
        )
        return trained_weights(made, ((x, y), (x, y)))

    expected = trained(tmp_path / "whole")
    for after in (12, 15):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"{after}")
        stopped(run, after)
        assert_same(trained(run, resume=True), expected)


class Turned(nn.Module):
    """Complex weights."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head((x * self.turn).real)


@pytest.mark.parametrize(
    "make",
    [lambda: Routed((3, 3, 3)), lambda: Routed((3, 5, 3)), Turned],
    ids=["branches", "branches of other sizes", "complex weights"],
)
def test_two_replicas_have_the_bits_of_one_chain_of_two_parts(make):
    """With weight decay, which moves what has a gradient, even 0, and nothing else."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    found = []
    for replicas, solver in ((1, Backprop(micro_batches=2)), (2, Backprop())):
        torch.manual_seed(1)
        model = nn.Sequential(make())
        made = trainer_of(model, solver, replicas=replicas, train={"batch_size": 8})
        made.fit((x, y), (x, y))
        found.append({k: v.clone() for k, v in model.state_dict().items()})
    assert_same(*found)


UNEVEN = {
    "ddg": (DDG(), 2, {"train": {"batch_size": 63}}),
    "fdg": (FDG(micro_batches=4), 2, {"train": {"batch_size": 7}}),
    "petra": (Petra(micro_batches=4), 2, {"train": {"batch_size": 7}}),
    "own steps in gaps": (
        AugmentedLagrangian(),
        2,
        {
            "train": {"batch_size": 17},
            "fill": True,
            "fill_step": "own",
            "gaps": [(4, 4), (0, 8), (0, 4)],
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
    monkeypatch.setattr("hybrid.method.settle.WINDOW", 1)
    run = tmp_path / "run"
    late = {"replicas": 2, "train": {"report_every": 1}, "checkpoint": OFTEN, "model": "plain"}
    trained_weights(trainer(Backprop(), run, sync=DiLoCo(steps=3, lag=2), **late), few)
    stopped(run, 7)  # in the second epoch, a round under way
    again = trainer(Backprop(), run, sync=AllReduce(), resume=True, **late)
    again.quiet = False
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


class Scaled(nn.Module):
    """One number for all, as a temperature is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    "sync", [LocalSGD(steps=3), DiLoCo(steps=6, lag=1)], ids=["local", "outer"]
)
def test_a_resume_keeps_each_replicas_momentum_of_a_number_too(sync, few, tmp_path):
    def made(resume):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(64, 16), Scaled(), nn.ReLU(), nn.Linear(16, 10)
        model, how = nn.Sequential(*layers), {"sync": sync, "train": {"epochs": 4}}
        return trainer_of(model, replicas=2, out=tmp_path / "run", resume=resume, **how)

    expected = {k: v.clone() for k, v in trained_weights(made(False), few).items()}
    interrupted(tmp_path / "run", after=2)
    assert_same(trained_weights(made(True), few), expected)


def test_replicas_of_a_script_that_seeds_nothing_start_with_the_weights_of_the_first(world):
    """Each rank has built another network, as the ranks' own seeds have it."""
    found = world.run(3, "samples:trained_unseeded")
    assert found[0] == found[1] == found[2]
