"""What holds for every sampler: no grid, resume or repetition changes what it means."""

import shutil
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from trainings import assert_same, digits, newest, trained_weights, trainer

from hybrid.data.mapped import Mapped
from hybrid.data.samplers import SAMPLERS, Choice, Learning, Sampler, Uniform
from hybrid.folder import checkpoint
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.settings.config import CheckpointSettings, LinkSettings
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.state import State


@dataclass(frozen=True)
class FirstSamples(Sampler):
    """A user's sampler, which takes the first samples alone, again and again."""

    name: ClassVar[str] = "first-samples"
    size: int = 50

    def start(self, data, seed):
        choice = type("FirstChoice", (Choice,), {"choose": self.choose})
        return choice(data, seed)

    def choose(self, epoch, first, count):
        return torch.arange(first, first + count) % self.size


@dataclass(frozen=True)
class Hardest(Learning):
    """A user's sampler that learns: all samples by their last losses, the largest half twice."""

    name: ClassVar[str] = "hardest"

    def start(self, data, seed):
        return HardestChoice(data, seed)


class HardestChoice(Choice):
    def __init__(self, data, seed):
        super().__init__(data, seed)
        self.losses = torch.full((self.count,), torch.inf)
        self.order, self.epoch = torch.arange(self.count), torch.tensor(-1)

    def choose(self, epoch, first, count):
        if epoch != self.epoch:  # the same mini-batch may be asked for again
            hardest = self.losses.argsort(descending=True, stable=True)[: self.count // 2]
            self.order, self.epoch = torch.cat([hardest] * 2), torch.tensor(epoch)
        return self.order[first : first + count]

    def learn(self, ids, losses):
        self.losses[ids] = losses

    def state(self):
        kept = {"losses": self.losses, "order": self.order, "epoch": self.epoch}
        return State(block={name: x.clone() for name, x in kept.items()})

    def load_state(self, state):
        if state.block:
            self.losses, self.order = state.block["losses"], state.block["order"]
            self.epoch = state.block["epoch"]


EXAMPLES = {
    "uniform": Uniform(),
    "first-samples": FirstSamples(),
    "hardest": Hardest(lag=2),
}


@pytest.fixture(scope="module")
def few():
    return digits(6)


@pytest.fixture(scope="module", params=EXAMPLES)
def sampler(request):
    return EXAMPLES[request.param]


@pytest.fixture(scope="module")
def on_one_block(sampler, few):
    return train(few, Backprop(), sampler=sampler, blocks=1)


def train(few, solver, out=None, **settings):
    return trained_weights(trainer(solver, out, **{"model": "plain", **settings}), few)


def test_every_sampler_is_in_the_sample():
    assert set(SAMPLERS.places) <= set(EXAMPLES)


def test_the_choice_depends_on_no_grid(sampler, on_one_block, few):
    virtual = LinkSettings(kind="virtual")
    assert_same(train(few, Backprop(), sampler=sampler, links=virtual), on_one_block)
    every_step = {"report_every": 1}
    found = train(few, Backprop(), sampler=sampler, blocks=4, train=every_step)
    assert_same(found, on_one_block)
    if not isinstance(sampler, Uniform):
        plain = train(few, Backprop(), blocks=1)
        assert any(not torch.equal(plain[name], on_one_block[name]) for name in plain)


def test_replicas_choose_as_one_chain_that_accumulates(sampler, few):
    found = train(few, Backprop(), sampler=sampler, replicas=2)
    assert_same(found, train(few, Backprop(micro_batches=2), sampler=sampler))


FILLED = {"fill": "augmented-lagrangian", "local_budget": [(16, 0), (0, 8)]}
RESUMES = [
    # between two epochs, and in the second one
    *((Backprop(), each, 3, 6, {}) for each in EXAMPLES.values()),
    (Backprop(), EXAMPLES["hardest"], 3, 8, {}),
    (DDG(), Hardest(lag=4), 2, 10, {}),  # mini-batches are under way between blocks
    # the records that fill waits are of mini-batches that the sampler chose before
    # and asks all ranks for, of which one may have no waits
    (DDG(), Hardest(lag=4), 2, 10, {**FILLED, "local_budget": [(0, 0), (0, 8)]}),
]


@pytest.mark.parametrize(
    ("solver", "sampler", "blocks", "stopped", "more"),
    RESUMES,
    ids=lambda value: getattr(value, "name", None),
)
def test_resumed_is_uninterrupted(
    solver, sampler, blocks, stopped, more, few, tmp_path, monkeypatch
):
    """From a checkpoint in mid-epoch or between epochs, on other blocks, too."""
    monkeypatch.setattr(
        "hybrid.training.shared_folder.SharedFolder.checkpoint_is_due", lambda folder: True
    )
    settings = {"sampler": sampler, "train": {"report_every": 1}, **more}
    settings["checkpoint"] = CheckpointSettings(keep_last=0, minutes=1)
    run = tmp_path / "run"
    expected = train(few, solver, run, **settings)
    for folder in checkpoint.complete(run / "checkpoints"):
        if int(folder.name) > stopped:
            shutil.rmtree(folder)
    assert int(newest(run).name) == stopped
    (run / "summary.json").unlink()
    assert_same(train(few, solver, run, blocks=blocks, resume=True, **settings), expected)


class Noise:
    """Items whose fraction is drawn by a transform, and whose whole part is the sample."""

    def __len__(self):
        return 200

    def __getitem__(self, i):
        return torch.rand(1, dtype=torch.float64) + i, i % 10


def test_no_augmented_sample_is_trained_on_twice_in_an_epoch(sampler):
    chosen = BatchSampler(sampler, Mapped(Noise(), augmented=True), 0, 20)
    for epoch in range(4):
        seen = []
        for n in range(chosen.steps):
            (ids,) = chosen.ids(epoch, [n])
            chosen.take_losses([[torch.rand(20)]])
            seen += chosen.choice.data.batch(ids, 0, epoch)[:, 0].tolist()
            assert (chosen.choice.data.targets(ids, 0, epoch) == ids % 200 % 10).all()
    assert max(Counter(seen).values()) == 1
    repeated = max(Counter(map(int, seen)).values()) > 1
    assert repeated == chosen.choice.repeats


def test_a_choice_of_samples_that_do_not_exist_is_refused():
    chosen = BatchSampler(FirstSamples(size=300), Mapped(Noise()), 0, 20)
    with pytest.raises(ValueError, match="choice has sample 200 of a data set of 200"):
        chosen.ids(0, [10])
    chosen.choice.choose = lambda epoch, first, count: torch.zeros(count, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"choice is \(20,\) of torch\.uint8; it must be"):
        chosen.ids(1, [0])


def test_a_sampler_that_fails_on_one_rank_ends_the_run(monkeypatch, few):
    calls = []

    def choose(sampler, epoch, first, count):
        calls.append(first)
        if len(calls) == 5:
            raise OSError("one rank's file cannot be read")
        return torch.arange(first, first + count)

    monkeypatch.setattr(FirstSamples, "choose", choose)
    with pytest.raises((ValueError, OSError), match="one rank's file cannot be read"):
        train(few, Backprop(), sampler=FirstSamples(), blocks=1, replicas=2)
