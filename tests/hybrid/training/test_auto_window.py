"""Windows that follow residual and learning rate: the same on all links, and after a resume."""

import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch
from trainings import (
    BATCH,
    assert_same,
    digests,
    digits,
    interrupted,
    lines,
    refused,
    trained_weights,
    trainer,
    weights,
)

from hybrid.settings.config import CheckpointSettings, LinkSettings
from hybrid.solvers import AugmentedLagrangian
from hybrid.solvers.splitting.store import Store

AUTO: dict[str, Any] = {
    "window": "auto",
    "window_limit": 8,
    "residual_limit": 0.2,
    "sweeps": 2,
    "train": {"epochs": 5, "report_every": 4},
}


@pytest.fixture(scope="module")
def few():
    """Ten mini-batches."""
    return digits(10)


@pytest.fixture(scope="module")
def run(few, tmp_path_factory):
    """A run with a checkpoint after every report."""
    out = tmp_path_factory.mktemp("auto") / "run"
    made(out).fit(*few)
    return out


def made(out, **settings):
    often = CheckpointSettings(keep_last=0, minutes=1e-9)
    return trainer(AugmentedLagrangian(), out, checkpoint=often, **AUTO, **settings)


def paces(out):
    """(mini-batches, sweeps) of the parallel phases."""
    parallel = [line for line in lines(out) if line["phase"] == "parallel"]
    return [(line["window"], line["sweeps"]) for line in parallel]


def test_windows_grow_and_sweeps_come_as_the_rate_falls(run):
    found = paces(run)
    assert len({*found}) > 2
    for one, other in pairwise(found):
        factors = [max(a, b) // min(a, b) for a, b in zip(one, other, strict=True)]
        assert sorted(factors) in ([1, 1], [1, 2])
    serial = [line for line in lines(run) if line["phase"] == "serial"]
    assert all("window" not in line for line in serial)
    assert sum(line["samples"] for line in serial) == 5 * 10 * BATCH


@pytest.mark.parametrize("after", [4, 13])
def test_a_resumed_run_gives_the_bits_of_an_undisturbed_one(after, run, few, tmp_path):
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    interrupted(resumed, after)
    made(resumed, resume=True).fit(*few)
    assert digests(resumed) == digests(run)
    assert lines(resumed) == lines(run)


def test_virtual_clocks_give_the_bits_of_threads(run, few):
    # MPI: test_on_ranks.py
    assert_same(trained_weights(made(None, links=LinkSettings(kind="virtual")), few), weights(run))


def test_the_norm_of_a_store_is_that_of_the_windows_rows():
    store = Store(8, "float32")
    for rows in (slice(0, 3), slice(3, 6), slice(0, 2), slice(2, 4)):
        store.put("kappa_in", rows, torch.full((rows.stop - rows.start, 1), 2.0))
    store._buffers["kappa_in"][4:] = float("nan")
    assert store.norm("kappa_in") == 4.0


def test_the_largest_window_must_fit_into_the_memory(few):
    said = refused(trainer(AugmentedLagrangian(), **AUTO, memory_gb=1e-3), few)
    assert said.startswith("a window of 8 mini-batches needs ")
    assert ": set rounds.window_limit=" in said


def test_a_run_stopped_within_an_epoch_goes_on_with_windows_that_begin_there(run, few, tmp_path):
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    interrupted(resumed, 1)
    fixed = trainer(AugmentedLagrangian(), resumed, resume=True, window=4, train=AUTO["train"])
    assert "with window auto, not 4: resume with its" in refused(fixed, few)
