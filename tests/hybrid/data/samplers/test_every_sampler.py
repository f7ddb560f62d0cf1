"""What holds for every sampler: no grid, resume or repetition changes what it means."""

import shutil
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from answers import output, refusal
from trainings import assert_same, digits, newest, trained_weights, trainer, weights

from hybrid.data.mapped import Mapped
from hybrid.data.samplers import (
    SAMPLERS,
    AutoAssist,
    Choice,
    Learning,
    Sampler,
    SelectiveBackprop,
    Uniform,
)
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


EXAMPLES = {
    "uniform": Uniform(),
    "auto-assist": AutoAssist(lag=2, lr=1.0),
    "selective-backprop": SelectiveBackprop(lag=2),
    "first-samples": FirstSamples(),
}
LEARNING = [sampler for sampler in EXAMPLES.values() if isinstance(sampler, Learning)]
ACCEPTING_ALL = [AutoAssist(gamma=1), SelectiveBackprop(beta=0)]


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


def test_the_choice_is_the_same_under_mpirun(world, tmp_path, few):
    """Processes take seconds to start."""
    out = tmp_path / "run"
    flags = ["sampler.name=auto-assist", "sampler.lag=2", "sampler.lr=1.0"]
    flags += ["train.threads=1", "data.limit=192", "train.report_every=2"]
    words = [word for flag in flags for word in ("--set", flag)]
    run = ("train", "--epochs", 2, "--batch-size", 32, "--solver", "ddg", *words, "--out", out)
    output(world.hybrid(2, *run))
    made = trainer(DDG(), sampler=EXAMPLES["auto-assist"], train={"report_every": 2})
    assert_same(weights(out), trained_weights(made, (few[0], digits()[1])))


FILLED = {"fill": "augmented-lagrangian", "local_budget": [(16, 0), (0, 8)]}
RESUMES = [
    # between two epochs, and in the second one
    *((Backprop(), each, 3, 6, {}) for each in EXAMPLES.values()),
    *((Backprop(), EXAMPLES[name], 3, 8, {}) for name in ("auto-assist", "selective-backprop")),
    (DDG(), SelectiveBackprop(lag=4), 2, 10, {}),  # mini-batches are under way between blocks
    # the records that fill waits are of mini-batches that the sampler chose before
    # and asks all ranks for, of which one may have no waits
    (DDG(), SelectiveBackprop(lag=4), 2, 10, {**FILLED, "local_budget": [(0, 0), (0, 8)]}),
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
