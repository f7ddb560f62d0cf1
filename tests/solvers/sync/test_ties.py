"""A weight that several blocks have: copies with the bits of the undivided network's weight."""

import shutil

import pytest
import torch
from torch import nn
from trainings import assert_same

from hybrid import Trainer, split
from hybrid.folder import checkpoint
from hybrid.networks.own_units import build_own, divide
from hybrid.settings.config import CheckpointSettings
from hybrid.solvers import DDG, Backprop

IDS = torch.randint(7, (24, 5), generator=torch.Generator().manual_seed(1))


class Shared(nn.Module):
    """An embedding that two output layers have, too."""

    def __init__(self, width=16, words=7):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.heads = nn.ModuleList(nn.Linear(width, words, bias=False) for _ in range(2))
        for head in self.heads:
            head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers[:2]:
            x = x + layer(x)
        early = self.heads[0](x)
        for layer in self.layers[2:]:
            x = x + layer(x)
        return self.heads[1](x) + early


def loss(out, ids):
    return nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())


def trained(blocks, solver, **given):
    torch.manual_seed(0)
    model = Shared()
    settings = {"epochs": 1, "batch_size": 4, "threads": 1, "report_every": 1}
    made = Trainer(
        split(model, blocks, sample=IDS[:4]),
        solver,
        loss=loss,
        metrics={},
        train={**settings, **given.pop("train", {})},
        optimizer={"name": "adamw", "lr": 0.01},
        quiet=True,
        **given,
    )
    made.fit((IDS, IDS), (IDS, IDS))
    return model.state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": Backprop(clip_norm=0.3), "train": {"ema": 0.9}},
        {"solver": Backprop(), "train": {"frozen": ["heads.0"]}},
        {"solver": Backprop(), "train": {"frozen": {"embedding": 1}, "epochs": 2}},
    ],
    ids=["clipped", "frozen", "thawed"],
)
def test_blocks_have_the_bits_of_the_undivided_network(settings):
    expected = trained(1, **settings)
    for blocks in (2, 3):
        assert_same(trained(blocks, **settings), expected)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step", [3, 6])
def test_a_resume_in_mid_flight_goes_on_as_if_nothing_had_been(step, tmp_path, monkeypatch):
    """Blocks that wait for what others have used must not keep these from their first step."""
    monkeypatch.setattr("hybrid.method.settle.WINDOW", 1)  # or checkpoints wait for its end
    saved = {"checkpoint": CheckpointSettings(minutes=1e-9, keep_last=0), "solver": DDG(2)}
    expected = trained(3, out=tmp_path / "whole", **saved)
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    folders = checkpoint.complete(run / "checkpoints")
    assert step in [int(folder.name) for folder in folders]
    for folder in folders:
        if int(folder.name) > step:
            shutil.rmtree(folder)
    (run / "summary.json").unlink()
    assert_same(trained(3, out=run, resume=True, **saved), expected)


def test_a_rank_builds_a_weight_that_any_of_its_blocks_uses():
    def make():
        torch.manual_seed(0)
        return Shared(width=64, words=512)

    ids = torch.randint(512, (4, 5))
    division = divide(make, lambda model, cuts=None: split(model, 2, cuts=cuts, sample=ids), False)
    assert frozenset({0, 1}) in {each.blocks for each in division.allocations.values()}
    expected = make().embedding.weight
    for rank in (0, 1):
        assert torch.equal(build_own(make, division, [rank]).embedding.weight, expected)
