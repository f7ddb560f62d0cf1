"""Samplers that learn: what they accept, on any grid, and what a resumed run accepts."""

import pytest
import torch
from answers import output, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainings import (
    assert_same,
    digits,
    lines,
    refused,
    summary,
    trained_weights,
    trainer,
    weights,
)

from hybrid.data import Dataset
from hybrid.data.sampling import epoch_order
from hybrid.registries import SAMPLERS
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.state import State
from hybrid_samplers import AutoAssist, SelectiveBackprop
from tests.hybrid.data.samplers import test_every_sampler as every

pytestmark = pytest.mark.skipif(
    "auto-assist" not in SAMPLERS, reason="the package is installed without its entry points"
)
LEARNING = [AutoAssist(lag=2, lr=1.0), SelectiveBackprop(lag=2)]
ACCEPTING_ALL = [AutoAssist(gamma=1), SelectiveBackprop(beta=0)]


@pytest.fixture(scope="module")
def few():
    return digits(6)


@pytest.mark.parametrize("sampler", LEARNING, ids=lambda sampler: sampler.name)
def test_the_choice_is_that_of_one_rank_on_any_grid(sampler, few):
    on_one_block = every.train(few, Backprop(), sampler=sampler, blocks=1)
    every.test_the_choice_depends_on_no_grid(sampler, on_one_block, few)
    every.test_replicas_choose_as_one_chain_that_accumulates(sampler, few)
    every.test_no_augmented_sample_is_trained_on_twice_in_an_epoch(sampler)


RESUMES = [
    # between two epochs, and in the second one
    *((Backprop(), sampler, 3, stopped, {}) for sampler in LEARNING for stopped in (6, 8)),
    (DDG(), SelectiveBackprop(lag=4), 2, 10, {}),  # mini-batches are under way between blocks
]


@pytest.mark.parametrize(
    ("solver", "sampler", "blocks", "stopped", "more"),
    RESUMES,
    ids=lambda value: getattr(value, "name", None),
)
def test_resumed_is_uninterrupted(
    solver, sampler, blocks, stopped, more, few, tmp_path, monkeypatch
):
    every.test_resumed_is_uninterrupted(
        solver, sampler, blocks, stopped, more, few, tmp_path, monkeypatch
    )


@pytest.mark.parametrize("sampler", ACCEPTING_ALL, ids=lambda sampler: sampler.name)
def test_what_accepts_every_sample_is_uniform(sampler, few):
    expected = every.train(few, Backprop(), blocks=1)
    assert_same(every.train(few, Backprop(), sampler=sampler, blocks=1), expected)


@pytest.mark.slow
def test_the_choice_is_the_same_under_mpirun(world, tmp_path, few):
    """Processes take seconds to start."""
    out = tmp_path / "run"
    flags = ["sampler.name=auto-assist", "sampler.lag=2", "sampler.lr=1.0"]
    flags += ["train.threads=1", "data.limit=192", "train.report_every=2"]
    words = [word for flag in flags for word in ("--set", flag)]
    run = ("train", "--epochs", 2, "--batch-size", 32, "--solver", "ddg", *words, "--out", out)
    output(world.hybrid(2, *run))
    made = trainer(DDG(), sampler=LEARNING[0], train={"report_every": 2})
    assert_same(weights(out), trained_weights(made, (few[0], digits()[1])))


@pytest.mark.parametrize("sampler", LEARNING, ids=lambda sampler: sampler.name)
def test_forged_places_and_samples_are_refused(sampler, few):
    made, count = BatchSampler(sampler, few[0], 0, 8), len(few[0])
    for number in range(3):
        made.ids(0, [number])
        made.take_losses([[torch.ones(8)]])
    block = made.state().block
    late = next(name for name in block if name.endswith(" ids"))
    wheres = [[0, 0, place] for place in (-3, 2**62, count, count + 5)]
    wheres.append([0, -1, 24])
    forged = [("where", torch.tensor(where)) for where in wheres]
    forged += [(name, torch.full((8,), i)) for name in ("chosen", late) for i in (-1, count)]
    forged.append(("chosen", torch.zeros(count, dtype=torch.int64)))
    for name, tensor in forged:
        load = BatchSampler(sampler, few[0], 0, 8).load_state
        said = refusal(load, State(block=block | {name: tensor}))
        assert said.startswith("the sampler's ")
        assert " must be " in said


def pictures(count, classes=10):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return Dataset(images, labels, classes, (0.5,), (0.3,))


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
