"""Plans for networks of one's own, which are known by their blocks."""

import sys

import pytest
import torch
from answers import assert_one_line, output

from hybrid.bench.plan import planner as plan
from hybrid.bench.plan.standin import StandIn
from hybrid.bench.recipes import Recipe
from hybrid.data import as_data
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.networks.blocks import SAMPLES
from hybrid.networks.partition.split import split
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop

CODE = """
import torch
from torch import nn


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        first = self.first(x).tanh()
        second = self.second(first).tanh()
        return self.last(self.third(second).tanh() + first)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mixed, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids, mask):
        return {"logits": self.head(self.mixed(self.embed(ids)) * mask[..., None])}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 1), nn.BatchNorm1d(1), nn.Linear(4, 1)
        self.between = nn.Linear(1, 4)

    def forward(self, x):
        return self.norm(self.out(self.between(self.norm(self.into(x)))))


def normed_twice():
    return Normed()


def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def skips():
    return Skips()


def reader():
    return Reader()


def numbers():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return (x, x.sum(1, keepdim=True)), (x, x.sum(1, keepdim=True))


def text():
    ids = torch.randint(0, 20, (64, 6), generator=torch.Generator().manual_seed(0))
    items = [((row, torch.ones(6, dtype=torch.int64)), row) for row in ids]
    return items, items


def loss(output, ids):
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), ids.flatten())
"""
KINDS = {"skips": "numbers", "reader": "text"}
FAST = LinkSpeed(1e12, 0.0)


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path, monkeypatch):
    """As a user starts the command; what it imports from there does not stay."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("mine", None)


def loss_of(kind):
    return "mine:loss" if kind == "reader" else "mse"


def planner(kind, **settings):
    import mine

    given = {"train.batch_size": 16, "train.threads": 1, "train.loss": loss_of(kind)}
    resolved = load(None, {**given, **settings})
    data = as_data(getattr(mine, KINDS[kind])()[0])
    return plan.Planner(resolved, getattr(mine, kind)(), data, FAST)


def planner_of(name):
    import mine

    settings = load(None, {"train.batch_size": 16, "train.threads": 1, "train.loss": "mse"})
    return plan.Planner(settings, getattr(mine, name)(), as_data(mine.numbers()[0]), FAST)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_cuts_a_training_would_have(kind):
    made = planner(kind)
    subject = made.timed
    inputs = made.data.sample(SAMPLES)[0]  # on which costs depend
    trained = split(subject.network, 2, sample=inputs).with_bundles(inputs)
    blocks = made.blocks(2)
    assert blocks.cuts == trained.cuts
    (shape,) = trained.cut_shapes(trained.pack_inputs(inputs))
    sent = 2 * 4 * torch.Size(shape).numel()
    for solver in (Backprop(micro_batches=2), DDG(2), AugmentedLagrangian()):
        assert made.predict(blocks, Recipe("asked", solver)).bytes_per_image == sent


@pytest.mark.parametrize("kind", KINDS)
def test_stand_ins_have_the_blocks_weights_and_give_what_the_network_gives(kind):
    made = planner(kind)
    blocks = made.blocks(2)
    made.timed.measure(blocks, 16)
    instead = made.timed.stand_in(blocks)
    for k in range(2):
        real, other = (sum(p.numel() for p in b.module(k).parameters()) for b in (blocks, instead))
        assert real == other
        assert all(isinstance(m, StandIn) for u in instead.units_of(k) for m in u.parts.values())
    x = blocks.pack_inputs(made.data.sample(3)[0])
    found, expected = (b.module(1)(b.module(0)(x)) for b in (instead, blocks))
    if kind == "reader":
        found, expected = found["logits"], expected["logits"]
    assert found.shape == expected.shape
    found.sum().backward()
    assert all(p.grad is not None for p in instead.model.parameters())


def test_a_grid_that_cannot_be_cut_is_left_out_and_the_others_are_planned():
    """Its blocks would share a statistic; replicas of the whole do not."""
    made = planner_of("normed_twice")
    found = list(made.predictions([Grid(2), Grid(1, 2)], [2]))
    assert {p.grid for p in found} == {Grid(1, 2)}
    assert "blocks 0 and 1 share the statistic" in made.refused[0]
    with pytest.raises(ValueError, match="blocks 0 and 1 share the statistic"):
        next(made.predictions([Grid(2)], [2]))


def test_a_pass_that_cannot_be_is_told_with_what_to_change(timed_units):
    made = planner_of("normed_twice")
    with pytest.raises(
        ValueError, match=r"a pass over 16, 1 samples fails.*take fewer --micro-batch"
    ):
        next(made.predictions([Grid(1, 16)], [2]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_it_prints_trains(hybrid, kind):
    flags = ["--model", f"mine:{kind}", "--data", f"mine:{KINDS[kind]}", "--loss", loss_of(kind)]
    asked = ["--blocks", "2", "--micro-batches", "2", "--batch-size", "16"]
    said = output(hybrid("plan", *flags, *asked, "--set", "train.threads=1"))
    assert "| samples/s |" in said
    words = said.splitlines()[-1].replace("'", "").split()
    assert words[:4] == ["mpirun", "-n", "2", "hybrid"]
    output(hybrid(*words[4:], "--epochs", 1, "--out", "run"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "mine:normed", "--blocks", "5"), "5 blocks asked of 3 units"),
        (
            ("--model", "mine:skips", "--set", "model.survival=0.5"),
            "model.name is a built-in network",
        ),
        (("own.toml",), "code that would run, and a file says so: give --model mine:skips"),
        (("head.toml",), "code that would run, and a file says so: give --set solver.head=mine:it"),
    ],
)
def test_wrong_use_gets_one_line(hybrid, tmp_path, words, said):
    (tmp_path / "own.toml").write_text('[model]\nname = "mine:skips"\n')
    (tmp_path / "head.toml").write_text('[solver]\nname = "local-updates"\nhead = "mine:it"\n')
    given = ("--data", "mine:numbers", "--loss", "mse", "--batch-size", "16")
    assert_one_line(hybrid("plan", *words, *given, "--set", "train.threads=1"), said)
