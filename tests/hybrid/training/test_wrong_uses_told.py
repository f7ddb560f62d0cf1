"""What cannot work of a user's own under the command is answered once, on one line."""

import sys

import pytest
from answers import assert_one_line, output
from misused import fit

pytestmark = pytest.mark.timeout(60)


MODULE = """
import sys, torch
from torch import nn
CONSTANT = 3
def model(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
def failing(): raise KeyError("out of luck")
def leaving(): sys.exit(0)
def one(): return torch.zeros(4)
"""
COMMANDS = {
    "a model that is nowhere": (["--model", "nowhere:f"], "nowhere cannot be imported"),
    "a model that is a module": (["--model", "os:path"], "object is not callable"),
    "a model that is missing": (["--model", "own:f"], "own has no f"),
    "a model that is a number": (["--model", "own:CONSTANT"], "object is not callable"),
    "a model that fails": (["--model", "own:failing"], "failed: KeyError: 'out of luck'"),
    "a model that is a tensor": (["--model", "own:one"], "gave a Tensor, not a torch.nn.Module"),
    "a model that exits": (["--model", "own:leaving"], "own:leaving failed: SystemExit: 0"),
    "data that fail": (["--model", "own:model", "--data", "own:failing"], "--data own:failing"),
    "data that are one thing": (["--data", "own:one"], "gave a Tensor, not (training, test) data"),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's own module in the current folder."""
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own", None)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("use", COMMANDS)
def test_the_command_refuses_functions_that_are_none(use, hybrid, tmp_path):
    words, *parts = COMMANDS[use]
    answer = hybrid("train", *words, "--epochs", 1, "--out", tmp_path / "run")
    assert_one_line(answer, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("own")
def test_a_run_of_the_library_is_evaluated_with_its_model_alone(hybrid, tmp_path):
    fit(tmp_path / "run")
    answer = hybrid("evaluate", tmp_path / "run")
    assert_one_line(answer, "was made with --data of your own (custom)", "give --data")
    words = ["--model", "own:model", "--epochs", 1, "--set", "data.limit=64", "--batch-size", 32]
    output(hybrid("train", *words, "--out", tmp_path / "other"))
    answer = hybrid("evaluate", tmp_path / "other")
    assert_one_line(answer, "was made with --model own:model", "give --model own:model again")
