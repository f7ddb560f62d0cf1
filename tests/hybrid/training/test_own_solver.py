"""A method, a sampler and a strategy for replicas of a user's own really run."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from trainings import trainer_of

from hybrid import data
from hybrid.data.samplers import Choice, Sampler
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Backprop, PhaseStats, Program, Solver
from hybrid.solvers.base import program_of
from hybrid.solvers.exact.exact_pass import ExactPass
from hybrid.solvers.peers import Sync
from hybrid.solvers.sync.base import Strategy


@dataclass(frozen=True)
class Signs(Backprop):
    """Steps on the signs of the exact gradient."""

    name: ClassVar[str] = "signs"


@program_of(Signs)
class SignsProgram(ExactPass):
    def step(self, batch):
        for gradient in self.block.gradients():
            gradient.sign_()
        super().step(batch)


@dataclass(frozen=True)
class Halves(Solver):
    """Halves every weight a mini-batch; needs neither corrections nor neighbors."""

    name: ClassVar[str] = "halves"


@program_of(Halves)
class HalvesProgram(Program):
    def train(self, window):
        stats = PhaseStats()
        for _, batch in window.recorded():
            for parameter in self.block.module.parameters():
                parameter.data.mul_(0.5)
            stats.samples += len(batch)
            stats.steps += 1
        return stats


@dataclass(frozen=True)
class First(Sampler):
    """The first samples of the data set, again and again."""

    name: ClassVar[str] = "first"
    asked: ClassVar[list[tuple[int, int, int]]] = []

    def start(self, data, seed):
        class Chooses(Choice):
            def choose(self, epoch, first, count):
                First.asked.append((epoch, first, count))
                return torch.arange(count)

        return Chooses(data, seed)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits", None, 64)


def trained(solver, digits, **given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    start = {name: t.clone() for name, t in model.state_dict().items()}
    settings = {
        "train": {"epochs": 1},
        "optimizer": OptimizerSettings(lr=0.25, momentum=0, weight_decay=0),
        **given,
    }
    summary = trainer_of(model, solver, cuts=["3"], **settings).fit(*digits)
    moved = {name: t - start[name] for name, t in model.state_dict().items()}
    return summary, start, moved


def test_an_exact_method_of_ones_own_trains_by_itself(digits):
    summary, _, moved = trained(Signs(), digits)
    assert summary["solver"] == "signs"
    assert summary["parallel_seconds"] == 0
    # two steps of 0.25, each up or down
    assert set(moved["3.bias"].abs().mul(4).round().tolist()) == {0.0, 2.0}


def test_a_method_that_trains_alone_does(digits):
    summary, start, moved = trained(Halves(), digits)
    assert torch.equal(moved["1.weight"], -0.75 * start["1.weight"])
    assert summary["serial_seconds"] == 0


def test_a_sampler_chooses_every_mini_batch(digits):
    First.asked.clear()
    trained(Backprop(), digits, sampler=First())
    assert {(0, 0, 32), (0, 32, 32)} == set(First.asked)


def test_replicas_agree_where_weights_move(digits):
    calls = []

    class Watching(Sync):
        def before_step(self, kind, rate):
            self._note("before", any(g.any() for g in self.block.gradients()))
            return True

        def after_step(self, kind):
            self._note("after", bool(self.block.gradients()))

        def join(self):
            self._note("join", False)

        def _note(self, what, gradients):
            calls.append((what, self.block.index, self.peers.replica, gradients))

    @dataclass(frozen=True)
    class Watch(Strategy):
        name = "watch"
        program = Watching

    trained(Backprop(), digits, sync=Watch(), replicas=2)
    mine = [(what, gradients) for what, *where, gradients in calls if where == [1, 1]]
    evaluated, ended = ("join", False), ("join", False)
    assert mine == [*[("before", True), ("after", False)] * 2, evaluated, ended]
