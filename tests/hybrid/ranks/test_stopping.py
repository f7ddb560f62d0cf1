"""Stopping on request: a checkpoint at a round boundary, and the bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from torch import Tensor
from trainings import Data, assert_same, digits, lines, newest, trained_weights, trainer
from world import for_mpirun

from hybrid.errors import STOPPED, StoppedError
from hybrid.folder.checkpoint import complete, load_model, read_manifest
from hybrid.ranks.stopping import StopRequest, listening
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    LocalUpdates,
    Petra,
)
from hybrid_auxnet import AuxNet

BLOCKS, STEPS = 2, 10
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"solver": Backprop(micro_batches=2)},
    "local work": {
        "solver": DDG(micro_batches=2),
        "fill": "augmented-lagrangian",
        "local_budget": [(4, 0), (0, 8)],
        "model": "resnet8",
    },
    "windows": {"solver": AugmentedLagrangian(), "window": 3, "sweeps": 2},
    "every third round": {"solver": BlockADMM(), "window": 2, "correct_every": 3},
    "kept": {"solver": BlockADMM(rho=0.1), "window": "all", "correct_every": 0},
    "auxnet": {"solver": AuxNet(width=4), "window": 4},
    "fdg": {"solver": FDG(gradient_shrinking=0.8)},
    "petra, corrected": {
        "solver": Petra(micro_batches=3),
        "window": 2,
        "correct_every": 3,
        "model": "revnet8",
    },
    "local updates": {"solver": LocalUpdates(style="overlapping")},
    "float16": {
        "solver": AugmentedLagrangian(),
        "window": 4,
        "model": "plain",
        "train": {"precision": "float16"},
    },
}


@pytest.fixture(scope="module")
def few() -> Data:
    return digits(STEPS)


def train(
    name: str, out: Path | None, few: Data, blocks: int = BLOCKS, **settings: Any
) -> dict[str, Tensor]:
    """Two epochs, with reports after mini-batches 4, 8 and 10 of each; rarer for some methods."""
    way = {"model": "plain", **WAYS[name], **settings}
    train = {"report_every": 4, "evaluate_every": 9} | way.get("train", {})
    return trained_weights(trainer(**way | {"out": out, "blocks": blocks, "train": train}), few)


def ask_at(monkeypatch: pytest.MonkeyPatch, report: int) -> None:
    """Some rank is asked to stop before the `report`-th report of all ranks.

    The ranks look once before they begin, and then at every report.
    """
    calls, lock = 0, threading.Lock()

    def asked(self: StopRequest) -> str:
        nonlocal calls
        with lock:
            calls += 1
            return "SIGUSR1" if calls == BLOCKS * report + 1 else ""

    monkeypatch.setattr(StopRequest, "__call__", asked)


@pytest.fixture(scope="module")
def undisturbed(few: Data, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """`undisturbed(way)`: the weights and the metrics of the run that nobody stops."""

    @cache
    def whole(way: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        out = tmp_path_factory.mktemp("whole") / "run"
        return train(way, out, few), lines(out)

    return whole


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_resumes_to_the_bits_of_an_undisturbed_one(
    way: str, few, undisturbed, tmp_path, monkeypatch
) -> None:
    run = tmp_path / "run"
    ask_at(monkeypatch, 1)
    with pytest.raises(StoppedError, match=r"stopped by SIGUSR1 after step [0-9]+; go on with"):
        train(way, run, few)
    monkeypatch.undo()
    assert len(complete(run / "checkpoints")) == 2, "one from before the first step"
    step = read_manifest(newest(run))["step"]
    assert step == STEPS if way == "kept" else 0 < step < STEPS
    weights, metrics = undisturbed(way)
    assert_same(train(way, run, few, resume=True), weights)
    assert lines(run) == metrics


def test_what_is_under_way_is_dropped_aloud_where_the_cuts_are_others(
    few, tmp_path, monkeypatch, capsys
) -> None:
    ask_at(monkeypatch, 1)
    with pytest.raises(StoppedError):
        train("fdg", tmp_path / "run", few)
    monkeypatch.undo()
    trained = train("fdg", tmp_path / "run", few, resume=True, blocks=3, quiet=False)
    assert all(bool(t.isfinite().all()) for t in trained.values())
    said = capsys.readouterr()
    told = "what fdg had under way is dropped, because the blocks, the replicas, the"
    assert (said.out + said.err).count(told) == 1


@pytest.mark.parametrize("report", [2, 3])
def test_a_run_may_stop_at_an_epochs_last_report_and_in_the_next_epoch(
    report: int, few, undisturbed, tmp_path, monkeypatch
) -> None:
    run = tmp_path / "run"
    ask_at(monkeypatch, report)
    with pytest.raises(StoppedError):
        train("local work", run, few)
    monkeypatch.undo()
    manifest = read_manifest(newest(run))
    assert manifest["epoch"] == 1
    assert bool(manifest["states"]) == (report == 3), "records outlive no epoch"
    assert_same(train("local work", run, few, resume=True), undisturbed("local work")[0])


def test_signals_are_heard_while_listening_only_and_the_first_counts() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with listening() as outer:
        assert outer() == ""
        signal.raise_signal(signal.SIGUSR2)
        with listening() as inner:
            assert inner is outer
        signal.raise_signal(signal.SIGUSR1)
        assert outer() == "SIGUSR2"
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("numbers", "status"), [(["SIGUSR1", "SIGTERM"], -signal.SIGTERM), (["SIGTERM", "SIGUSR1"], 0)]
)
def test_a_second_sigterm_ends_the_process_at_once(numbers, status) -> None:
    program = (
        "import signal, sys\nfrom hybrid.__main__ import listening\n"
        "with listening():\n"
        "    assert 'torch' not in sys.modules\n"
        f"    for name in {numbers}:\n"
        "        signal.raise_signal(signal.Signals[name])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=30, check=False)
    assert done.returncode == status


def test_a_request_when_the_command_has_ended_does_not_change_its_status() -> None:
    program = (
        "import os, signal, sys\nfrom hybrid import __main__, cli\n"
        "def over(): raise SystemExit(3)\n"
        "cli.main = over\nsys.argv = ['hybrid', 'train']\n"
        "try:\n    __main__.main()\nfinally:\n"
        "    for name in ('SIGUSR1', 'SIGUSR2', 'SIGTERM', 'SIGINT'):\n"
        "        os.kill(os.getpid(), signal.Signals[name])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 3


def test_a_run_that_is_asked_to_stop_before_it_begins_leaves_no_folder(
    few, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(StopRequest, "__call__", lambda self: "SIGTERM")
    with pytest.raises(StoppedError, match="stopped by SIGTERM before training began; nothing"):
        train("local work", tmp_path / "run", few)
    assert not (tmp_path / "run").exists()


def test_a_loop_of_trainings_that_goes_on_after_failures_ends_at_a_request(
    few, tmp_path, monkeypatch, capsys
) -> None:
    ask_at(monkeypatch, 1)
    begun = []

    def search() -> None:
        for run in ("first", "second"):
            begun.append(run)
            with suppress(Exception):
                train("serial", tmp_path / run, few)

    with pytest.raises(SystemExit) as left:
        search()
    assert begun == ["first"]
    assert left.value.code == STOPPED  # with which Python ends, and says nothing itself
    said = capsys.readouterr().err
    assert said == f"hybrid: {left.value}\n"
    assert f"go on with resume=True, out='{tmp_path / 'first'}'" in said


def test_mpirun_passes_the_signal_on_and_ends_with_its_own_status(
    hybrid, hybrid_cli, tmp_path
) -> None:
    out = tmp_path / "run"
    command = [
        *(hybrid_cli.parent / "mpirun", "-n", "2", hybrid_cli, "train"),
        *("--epochs", "200", "--batch-size", "256", "--set", "train.threads=1", "--out", out),
    ]
    job = subprocess.Popen(
        [str(part) for part in command],
        env=os.environ | for_mpirun(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = monotonic() + 90
    while monotonic() < limit and not list((out / "checkpoints").glob("0*")):
        sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == STOPPED, errors
    assert errors.count("hybrid: stopped by SIGUSR1 after step") == 1
    assert "Traceback" not in errors
    manifest = read_manifest(newest(out))
    assert load_model(newest(out), manifest)
    words = ("train", "--resume", "--out", out, "--epochs", manifest["epoch"] + 1)
    status, _, err = hybrid(*words)
    assert status == 0, err
