"""Any input is accepted or answered in one line: no traceback, no wait, nothing written."""

import os
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from time import process_time

import pooch
import pytest
import requests
import torch
from commands import command
from hostile_settings import command_lines, toml_texts
from hypothesis import given, settings

from hybrid import data
from hybrid.solvers.local_work.budget import Cost

SECONDS = 10
MORE = settings(max_examples=3 * settings().max_examples)


@pytest.fixture(scope="module", autouse=True)
def set_up_only(tmp_path_factory):
    """Everything up to the first step is real; there is no network, and one thread."""
    counts: Counter[str] = Counter()
    digits = data.load("digits")
    load = data.load

    def offline(*_args, **_settings):
        raise requests.ConnectionError

    def quick_load(name, directory=None, limit=0):
        if name != "digits":
            return load(name, directory, limit)
        return digits[0].take(limit) if limit else digits[0], digits[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
        patch.setenv("HYBRID_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setattr(pooch, "retrieve", offline)
        patch.setattr(data, "load", quick_load)
        torch.set_num_threads(1)
        patch.setattr(torch, "set_num_threads", lambda _: None)
        patch.setattr("hybrid.training.run.Run.fit", lambda _: {})
        patch.setattr(torch.nn.Module, "compile", lambda *_, **options: None)
        # what units cost depends on no input, and takes the longest
        for costs in ("count_costs", "measure_costs"):
            patch.setattr(f"hybrid.networks.partition.split.{costs}", even)
        yield counts


def even(model, chain, sample):
    return [Cost(1.0, 2.0)] * len(chain)


@contextmanager
def nothing_written(folder):
    """The folder, and where errors nobody should see are kept, hold what they did."""

    def listing():
        logs = {p for p in os.listdir(tempfile.gettempdir()) if p.startswith("hybrid-error-")}
        return {str(p) for p in folder.rglob("*")} | {str(p) for p in Path().rglob("*")} | logs

    before = listing()
    yield
    assert listing() == before


def assert_answered(words, folder):
    begun = process_time()
    with nothing_written(folder):
        status, _, err = command(*words)
    assert process_time() - begun < SECONDS
    if status != 0:
        assert err.startswith("hybrid: error: ")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 2000
        assert "details in" not in err
        assert "Traceback" not in err
        assert len(err.split()) > 4


@MORE
@given(command_lines())
def test_a_command_line_is_accepted_or_answered_in_one_line(tmp_path, words):
    assert_answered(["train", "--out", str(tmp_path / "run"), *words], tmp_path)


@MORE
@given(toml_texts())
def test_a_settings_file_is_accepted_or_answered_in_one_line(tmp_path, text):
    file = tmp_path / "x.toml"
    file.write_bytes(text)
    assert_answered(["train", str(file), "--out", str(tmp_path / "run")], tmp_path)
