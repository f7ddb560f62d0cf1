"""What a run leaves behind when it is resumed, ended, or stopped between two reports."""

import errno
import json
import os

import pytest
import torch
import trainings
from torch import nn

from hybrid import Trainer, split
from hybrid.errors import AgreedError
from hybrid.folder import runfolder, traces
from hybrid.solvers import Backprop

SERIAL = Backprop()


def trainer(out, solver=SERIAL, cuts=("2",), **settings):
    """One epoch of the small network."""
    settings = {"quiet": False, "train": {"epochs": settings.pop("epochs", 1)}, **settings}
    made = trainings.trainer(solver, out, model="plain", **settings)
    made.blocks = split(trainings.network("plain"), cuts=cuts)
    return made


@pytest.fixture(scope="module")
def digits():
    return trainings.digits(3)


def contents(folder):
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_that_has_ended_stays_as_it_is_and_says_how_to_train_on(tmp_path, digits, capsys):
    summary = trainer(tmp_path / "run").fit(*digits)
    before = contents(tmp_path / "run")
    for cuts in (["2"], ["1"]):
        again = trainer(tmp_path / "run", resume=True, cuts=cuts)
        assert again.fit(*digits) == json.loads(json.dumps(summary))
        assert "has ended after 1 epoch," in (said := capsys.readouterr().out)
        assert "more epochs" in said
    assert contents(tmp_path / "run") == before
    longer = trainer(tmp_path / "run", resume=True, epochs=2).fit(*digits)
    assert longer["epochs"] == 2


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def test_a_run_of_an_undivided_network_goes_on_in_blocks_and_back(tmp_path, digits):
    """Its checkpoints know no units, as a sample of the inputs was not given."""

    def weights(run, *divided):
        for epochs, blocks in enumerate(divided, 1):
            torch.manual_seed(0)
            sample = {} if blocks == 1 else {"sample": torch.zeros(4, 1, 8, 8)}
            made = Trainer(
                split(Network(), blocks, **sample),
                SERIAL,
                train={"epochs": epochs, "batch_size": trainings.BATCH, "threads": 1},
                out=run,
                resume=epochs > 1,
                quiet=True,
            )
            made.fit(*digits)
        return dict(made.blocks.model.state_dict())

    changed = weights(tmp_path / "changed", 1, 2, 1)
    trainings.assert_same(changed, weights(tmp_path / "same", 1, 1, 1))


@pytest.mark.parametrize("last", ["metrics.jsonl", "summary.json"])
def test_a_disk_that_fills_at_the_end_leaves_a_run_that_a_resume_completes(
    last, tmp_path, digits, monkeypatch
):
    expected = trainer(None).fit(*digits)
    write, run = runfolder.write_atomically, tmp_path / "run"

    def full(path, content):
        # metrics.jsonl is written at the start, too
        if path.name == last and (last != "metrics.jsonl" or (run / "traces").exists()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(runfolder, "write_atomically", full)
        with pytest.raises(AgreedError, match="No space left on device"):
            trainer(run).fit(*digits)
    found = trainer(run, resume=True).fit(*digits)
    assert found["test_accuracy"] == expected["test_accuracy"]
    assert json.loads((run / "summary.json").read_text())["epochs"] == 1
    assert traces.spans(run)
