"""Samplers that learn: when they know a loss, and where they are refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from trainings import digits, refused, trained_weights, trainer

from hybrid.data.samplers import Choice, Learning
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    LocalUpdates,
    Penalty,
)
from hybrid_auxnet import AuxNet
from hybrid_messages import PDASGD


@pytest.fixture(scope="module")
def few():
    return digits(6)


@dataclass(frozen=True)
class Noting(Learning):
    """Takes the samples in order, and notes what it knows at every choice."""

    name: ClassVar[str] = "noting"
    log: ClassVar[list[tuple[int, list[int]]]] = []

    def start(self, data, seed):
        class Notes(Choice):
            def choose(self, epoch, first, count):
                Noting.log.append((epoch, first // count, list(self.known)))
                return (torch.arange(first, first + count) + epoch) % self.count

            def learn(self, ids, losses):
                assert len(losses) == len(ids)
                self.known.append(int(ids[0]))

            known: ClassVar[list[int]] = []

        return Notes(data, seed)


@pytest.mark.parametrize(
    ("solver", "more"),
    [
        *(
            (Backprop(), {"blocks": blocks, "replicas": replicas})
            for blocks, replicas in [(1, 2), (2, 1)]
        ),
        *((solver, {}) for solver in (DDG(), FDG(micro_batches=2), LocalUpdates())),
        (DDG(), {"window": 2, "correct_every": 2}),
        (PDASGD(), {"blocks": 1}),
        *((solver, {"window": 2}) for solver in (Penalty(), AugmentedLagrangian(), BlockADMM())),
        (AuxNet(), {"window": 3}),
        (DDG(), {"fill": "augmented-lagrangian", "local_budget": [(16, 0), (0, 8)]}),
        (AugmentedLagrangian(), {"window": 2, "correct_every": 0}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_losses_are_known_exactly_lag_mini_batches_later(solver, more, few):
    """Of whatever method: to mini-batch n those of mini-batches up to n - lag, in order."""
    lag = 3
    Noting.log.clear()
    Noting(lag=1).start(few[0], 0).known.clear()
    trained_weights(trainer(solver, sampler=Noting(lag=lag), model="plain", **more), few)
    seen = {}
    for epoch, number, known in Noting.log:
        seen.setdefault((epoch, number), known)
    assert list(seen) == [(epoch, number) for epoch in range(2) for number in range(6)]
    first = [(number * 32 + epoch) % 192 for epoch in range(2) for number in range(6)]
    for n, known in enumerate(seen.values()):
        assert known == first[: max(0, n - lag + 1)]


def test_losses_that_do_not_come_are_one_line(few):
    """Of a method of one's own that tells none."""
    made = trainer(Silent(), model="plain", sampler=Noting(lag=2))
    assert "has 0 losses of 64 samples: take a solver that reports" in refused(made, few)


class Silent(Backprop):
    name: ClassVar[str] = "silent"

    def start(self, block, links, setup):
        program = super().start(block, links, setup)
        train = program.train

        def silent(window):
            stats = train(window)
            stats.each = []
            return stats

        program.train = silent
        return program


REFUSED = [
    (
        AugmentedLagrangian(),
        {"sampler": Noting(lag=2), "window": 3},
        "are chosen together, and here it is 2 of 3: set a larger sampler.lag",
    ),
    (
        BlockADMM(),
        {"sampler": Noting(), "window": "all"},
        "sampler.name is 'noting', which works only where a window is a number",
    ),
    (
        PDASGD(any_order=True),
        {"sampler": Noting(), "blocks": 1},
        "as threads without an order do not: take another solver",
    ),
    (
        AuxNet(),
        {"sampler": Noting(), "window": 2, "correct_every": 2},
        "take another solver, rounds.correct_every=1",
    ),
    (
        Backprop(),
        {"sampler": Noting(), "loss": nn.CrossEntropyLoss()},
        "the sampler learns from a loss of each: give one that takes reduction='none'",
    ),
]


@pytest.mark.parametrize(("solver", "some", "reason"), REFUSED)
def test_what_cannot_learn_is_refused(solver, some, reason, few):
    assert reason in refused(trainer(solver, **some), few)
