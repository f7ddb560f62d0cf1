"""Checkpoints of a run that goes on are read, those with any names, and none that cannot be."""

import shutil

import pytest
import torch
from answers import refusal
from safetensors.torch import load_file
from torch import nn
from trainings import assert_same, interrupted

import hybrid
from hybrid import Trainer, files, split
from hybrid.folder import checkpoint
from hybrid.method.callback import Callback
from hybrid.solvers import DDG

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
DATA = X, X[:, :4].argmax(1)


class Named(nn.Module):
    """Parameters and buffers with names such as those of a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        names = "w:exact.momentum_buffer".replace(".", "_"), "a:b", "c"
        self.scales = nn.ParameterDict({name: torch.ones(16) for name in names})
        self.register_buffer("seen:so far", torch.zeros(3))

    def forward(self, x):
        x = self.first(x)
        for scale in self.scales.values():
            x = x * scale
        return x


def trainer(out, callbacks=(), **train):
    torch.manual_seed(0)
    net = nn.Sequential(Named(), nn.ReLU(), nn.Linear(16, 4))
    settings = {"epochs": 2, "batch_size": 16, "threads": 1, **train}
    cut = split(net, 2, sample=X[:4])
    options = {"train": settings, "out": out, "callbacks": list(callbacks), "quiet": True}
    return Trainer(cut, DDG(micro_batches=2), **options)


def test_tensors_of_any_name_are_exported_and_come_back(tmp_path):
    made = trainer(tmp_path / "run", ema=0.5)
    made.fit(DATA)
    wanted = made.blocks.model.state_dict()
    hybrid.export(tmp_path / "run", tmp_path / "file.safetensors")
    hybrid.export(tmp_path / "run", tmp_path / "folder", shard_gb=1e-6)
    assert_same(load_file(tmp_path / "file.safetensors"), wanted)
    folder = {}
    for shard in (tmp_path / "folder").glob("*.safetensors"):
        folder |= load_file(shard)
    assert_same(folder, wanted)
    interrupted(tmp_path / "run", 1)
    again = trainer(tmp_path / "run", ema=0.5)
    again.options.resume = True
    again.fit(DATA)
    assert_same(again.blocks.model.state_dict(), wanted)


class Diary(Callback):
    """Its state grows from a step on."""

    def __init__(self, state):
        self.kept = state
        self.epoch = 0

    def on_epoch(self, epoch, results):
        self.epoch = epoch

    def state(self):
        return self.kept if self.epoch > 1 else {}


NESTED: dict = {}
for _ in range(5000):
    NESTED = {"in": NESTED}


@pytest.mark.parametrize(
    ("state", "said"),
    [({"text": "x" * (20 << 20)}, "more than the 16777216 that are read"), (NESTED, "Diary")],
)
def test_a_checkpoint_that_could_not_be_read_is_not_written(tmp_path, state, said):
    made = trainer(tmp_path, [Diary(state)], epochs=3)
    assert said in refusal(made.fit, DATA)
    kept = checkpoint.complete(tmp_path / "checkpoints")
    assert kept[-1].name == "00000004"
    assert not list((tmp_path / "checkpoints").glob(".*"))
    again = trainer(tmp_path, [Diary({})], epochs=3)
    again.options.resume = True
    assert again.fit(DATA)["epochs"] == 3


@pytest.mark.parametrize("how", ["removed", "partly removed", "damaged"])
def test_what_a_run_removes_while_it_is_read_is_read_from_the_next(tmp_path, monkeypatch, how):
    run = tmp_path / "run"
    made = trainer(run)
    made.fit(DATA)
    wanted, newest = made.blocks.model.state_dict(), checkpoint.complete(run / "checkpoints")[-1]
    stale = newest.with_name("00000099")
    shutil.copytree(newest, stale)
    (run / "config.toml").write_text('[model]\nname = "Sequential"\n')
    real, spoilt = checkpoint.load_unit, []

    def spoiling(folder, manifest, name, *more):
        if folder == stale and not spoilt:
            spoilt.append(name)
            if how == "removed":
                files.remove(stale)
            elif how == "partly removed":
                (stale / checkpoint.MANIFEST).unlink()
                (stale / manifest["units"][name]["file"]).unlink()
            elif how == "damaged":
                (stale / manifest["units"][name]["file"]).write_bytes(b"other")
        return real(folder, manifest, name, *more)

    monkeypatch.setattr(checkpoint, "load_unit", spoiling)
    if how == "damaged":
        with pytest.raises(ValueError, match="00000099"):
            hybrid.export(run, tmp_path / "file.safetensors")
        return
    hybrid.export(run, tmp_path / "file.safetensors")
    assert spoilt
    assert_same(load_file(tmp_path / "file.safetensors"), wanted)
