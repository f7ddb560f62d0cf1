"""Samplers that learn: what they accept, when they know a loss, and where they are refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainings import digits, lines, refused, summary, trained_weights, trainer

from hybrid.data import Dataset
from hybrid.data.samplers import AutoAssist, Choice, Learning, SelectiveBackprop
from hybrid.data.sampling import epoch_order
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


def pictures(count, classes=10):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return Dataset(images, labels, classes, (0.5,), (0.3,))


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


def test_inputs_that_are_not_finite_are_one_line(few):
    """They would never be accepted, and an epoch of them would never end."""
    images = few[0].batch(torch.arange(64), 0, 0).clone()
    images[5] = torch.nan
    made = trainer(Backprop(), model="plain", sampler=AutoAssist(lag=1))
    assert "probability for sample 5 is not finite" in refused(
        made, ((images, few[0].targets(torch.arange(64))), few[1])
    )


def test_every_epoch_says_what_it_accepted(few, tmp_path):
    run = tmp_path / "run"
    trained_weights(trainer(Backprop(), run, sampler=SelectiveBackprop(lag=2), model="plain"), few)
    said = [line for line in lines(run) if line["phase"] == "sampler"]
    assert [line["epoch"] for line in said] == [0, 1]
    assert said[0]["accepted"] == 1  # no sample had a loss before
    assert said[1]["accepted"] == pytest.approx(192 / said[1]["candidates"])
    assert said[1]["accepted"] < 1
    assert summary(run)["epochs"] == 2


@settings(max_examples=30)
@given(st.integers(2, 60), st.integers(1, 20), st.floats(0.05, 1), st.integers(0, 5))
def test_rejected_candidates_are_replaced_by_the_next(count, size, gamma, seed):
    """Whatever is accepted: an epoch is its permutations, one after the other, with gaps."""
    size = min(size, count)
    choice = AutoAssist(gamma=gamma).start(pictures(count), seed)
    for epoch in range(2):
        ids = [choice.choose(epoch, i * size, size) for i in range(count // size)]
        assert all(len(part) == size for part in ids)
        assert torch.equal(ids[0], choice.choose(epoch, 0, size))  # asked once more
        found = torch.cat(ids).tolist()
        looked = choice.epoch_statistics()["candidates"]
        turns = -(-looked // count)
        order = torch.cat([epoch_order(seed, epoch, count, turn) for turn in range(turns)])
        candidates = iter(order.tolist()[:looked])
        assert all(i in candidates for i in found)  # in this order
        assert choice.epoch_statistics()["accepted"] == pytest.approx(len(found) / looked)


def test_the_assistant_descends_on_the_logistic_loss():
    data, gamma = pictures(64, 4), 0.25
    sampler = AutoAssist(gamma=gamma, lr=0.3, decay=0.05)
    choice = sampler.start(data, 0)
    x = data.batch(torch.arange(64), 0, 0, augment=False).flatten(1).double()
    w = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    total = number = 0.0
    for step in range(5):
        ids = epoch_order(0, step, 64)[:16]
        losses = torch.rand(16, generator=torch.Generator().manual_seed(step))
        total, number = 0.75 * total + losses.double().sum(), 0.75 * number + 16
        targets = (losses > total / number).double()
        score = x[ids] @ w + b[data.targets(ids)]
        loss = nn.functional.binary_cross_entropy_with_logits(score, targets)
        loss = loss + 0.05 / 2 * (w**2).sum()
        with torch.no_grad():
            for parameter, g in zip((w, b), torch.autograd.grad(loss, (w, b)), strict=True):
                parameter -= 0.3 * g
        choice.learn(ids, losses)
        a = torch.sigmoid(x @ w + b[data.targets(torch.arange(64))]).detach()
        expected = gamma + (1 - gamma) * a
        torch.testing.assert_close(choice.probabilities(torch.arange(64)), expected)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 8))
def test_percentiles_are_those_of_the_last_losses(losses, history):
    data = pictures(len(losses) + 1)
    choice = SelectiveBackprop(beta=2, history=history).start(data, 0)
    ids = torch.arange(len(losses))
    choice.learn(ids, torch.tensor(losses, dtype=torch.float32))
    found = choice.probabilities(torch.arange(len(losses) + 1))
    among = losses[-history:]
    for i, loss in enumerate(losses):
        assert found[i] == pytest.approx((sum(x <= loss for x in among) / len(among)) ** 2)
    assert found[-1] == 1  # of a sample without a loss


def test_losses_that_do_not_come_are_one_line(few):
    """Of a method of one's own that tells none."""
    made = trainer(Silent(), model="plain", sampler=SelectiveBackprop(lag=2))
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
        {"sampler": AutoAssist(lag=2), "window": 3},
        "are chosen together, and here it is 2 of 3: set a larger sampler.lag",
    ),
    (
        BlockADMM(),
        {"sampler": AutoAssist(), "window": "all"},
        "sampler.name is 'auto-assist', which works only where a window is a number",
    ),
    (
        PDASGD(any_order=True),
        {"sampler": SelectiveBackprop(), "blocks": 1},
        "as threads without an order do not: take another solver",
    ),
    (
        AuxNet(),
        {"sampler": SelectiveBackprop(), "window": 2, "correct_every": 2},
        "take another solver, rounds.correct_every=1",
    ),
    (
        Backprop(),
        {"sampler": SelectiveBackprop(), "loss": nn.CrossEntropyLoss()},
        "the sampler learns from a loss of each: give one that takes reduction='none'",
    ),
]


@pytest.mark.parametrize(("solver", "some", "reason"), REFUSED)
def test_what_cannot_learn_is_refused(solver, some, reason, few):
    assert reason in refused(trainer(solver, **some), few)
