"""Run folders read again, and functions of a user's own: they run if the command names them."""

import json
import sys

import pytest
import torch
from answers import assert_one_line, output
from commands import command
from misused import fit
from safetensors.torch import load_file
from trainings import assert_same

import hybrid as package
from hybrid.folder import checkpoint

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    made = TensorDataset(x, x.sum(1, keepdim=True))
    return made, made


def loss(output, targets):
    return (output - targets).square().mean(1)


number = 3


def failing():
    raise KeyError("out of luck")


def leaving():
    raise SystemExit(0)


def one():
    return torch.zeros(4)
"""
NAMED = ("--model", "mine:network", "--data", "mine:data", "--loss", "mine:loss")
SHORT = ("--epochs", "1", "--batch-size", "16", "--set", "train.threads=1", "--lr", "0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("own")
    (made / "mine.py").write_text(CODE)
    return made


@pytest.fixture(autouse=True)
def in_its_folder(folder, monkeypatch):
    """As a user starts the command; what it imports from there does not stay."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def trained(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        status, _, err = command("train", *NAMED, *SHORT, "--out", "run")
    assert (status, err) == (0, "")
    return folder / "run"


def last_test(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == "test"][-1]


def test_a_run_of_ones_own_is_evaluated_exported_reported_and_goes_on(trained, folder):
    status, out, err = command("evaluate", "run", *NAMED)
    assert (status, err) == (0, "")
    assert out.startswith(f"test loss {last_test(trained)['test_loss']:.4g}  (")
    assert command("export", "run", "network.safetensors")[0] == 0
    assert command("report", "run")[0] == 0
    assert "test loss" in (trained / "report" / "index.html").read_text()
    resumed = command("train", *NAMED, "--resume", "--epochs", "2", "--out", "run")
    assert resumed[0] == 0, resumed
    assert last_test(trained)["epoch"] == 2
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.load_state_dict(load_file(folder / "network.safetensors"))
    again = package.load(trained, model)
    assert not again.training


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--resume", "--out", "run"), "--model mine:network on the command line"),
        (("train", "--resume", "--out", "run", *NAMED[:2]), "--data mine:data"),
        (("train", "run/config.toml"), "--model mine:network on the command line"),
        (("evaluate", "run"), "--data mine:data again"),
        (("evaluate", "run", *NAMED[2:]), "--model mine:network again"),
        (("evaluate", "run", *NAMED[:4]), "--loss mine:loss again"),
    ],
)
def test_a_file_alone_runs_no_code(trained, arguments, said):
    assert_one_line(command(*arguments), said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "mine.py:network"), "the name of a file: give --model mine:network"),
        (("--model", "mine:netwrk"), "mine has no netwrk; did you mean 'network'?"),
        (("--data", "custom"), "made by a script, on data of its own"),
        (("--model", "nowhere:f"), "nowhere cannot be imported"),
        (("--model", "os:path"), "object is not callable"),
        (("--model", "mine:number"), "object is not callable"),
        (("--model", "mine:failing"), "failed: KeyError: 'out of luck'"),
        (("--model", "mine:one"), "gave a Tensor, not a torch.nn.Module"),
        (("--model", "mine:leaving"), "mine:leaving failed: SystemExit: 0"),
        (("--data", "mine:failing"), "--data mine:failing"),
        (("--data", "mine:one"), "gave a Tensor, not (training, test) or (training"),
    ],
)
def test_what_is_no_function_or_gives_the_wrong_thing_is_refused(words, said, tmp_path):
    assert_one_line(command("train", *words, "--out", tmp_path / "run"), said)
    assert not (tmp_path / "run").exists()


def test_a_run_of_the_library_is_evaluated_with_its_model_alone(tmp_path):
    fit(tmp_path / "run")
    answer = command("evaluate", tmp_path / "run")
    assert_one_line(answer, "was made with your own data (custom)", "give --data")


@pytest.fixture
def first_is_best(run_folder):
    """A run whose first epoch did best, and that kept it."""
    config = run_folder / "config.toml"
    config.write_text(config.read_text().replace("\nbest = false", "\nbest = true"))
    return told(run_folder, tested={"accuracy": 1.0})


def told(run, **news):
    """Let the checkpoint of the first epoch tell other things; gives it."""
    folder = run / "checkpoints" / "00000005"
    body = {**checkpoint.read_manifest(folder), **news}
    text = json.dumps({**body, "sha256": checkpoint.digest(body)})
    (folder / "manifest.json").write_text(text)
    return folder


def test_evaluate_takes_the_best_if_asked(hybrid, run_folder, first_is_best):
    assert f"({first_is_best})" in output(hybrid("evaluate", run_folder, "--best"))
    assert "00000010)" in output(hybrid("evaluate", run_folder))


def test_export_takes_the_best_if_asked(hybrid, run_folder, first_is_best, tmp_path):
    file = tmp_path / "model.safetensors"
    output(hybrid("export", run_folder, file, "--best"))
    manifest = checkpoint.read_manifest(first_is_best)
    assert_same(load_file(file), checkpoint.load_model(first_is_best, manifest))


def test_a_run_that_kept_no_best_says_how_to(hybrid, run_folder, tmp_path):
    for words in (("evaluate", run_folder), ("export", run_folder, tmp_path / "m.safetensors")):
        answer = hybrid(*words, "--best")
        assert_one_line(answer, "kept its newest 2 checkpoints", "checkpoint.best=true")


def test_a_run_without_a_tested_checkpoint_has_no_best(hybrid, run_folder, first_is_best):
    told(run_folder, tested_step=None)
    (run_folder / "checkpoints" / "00000010" / "manifest.json").unlink()
    assert_one_line(hybrid("evaluate", run_folder, "--best"), "weights that were measured")
