"""Whoever reads the output may leave: the run goes on, and ends with the status it earned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep

import pytest

from hybrid.folder import checkpoint

QUICK = ("--batch-size", "256", "--set", "train.threads=1", "--set", "train.report_every=1")


def start(out: Path, *words: str, **streams: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hybrid", "train", *QUICK, *words, "--out", str(out)]
    return subprocess.Popen(command, text=True, **streams)  # type: ignore[call-overload, no-any-return]


def broken() -> int:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


STREAMS = {"a reader that left": broken, "a full disk": lambda: os.open("/dev/full", os.O_WRONLY)}


def test_a_reader_that_takes_one_line_ends_no_run(tmp_path) -> None:
    """A process of its own, which loads torch: what Python does at its end counts."""
    command: Sequence[str] = (sys.executable, "-m", "hybrid", "train", *QUICK, "--epochs", "2")
    script = 'set -o pipefail; "$@" | head -n 1'
    done = subprocess.run(
        ["bash", "-c", script, "x", *command, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert "nobody reads the output any more; the run goes on" in done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("stream", "why"),
    [("a reader that left", "Broken pipe"), ("a full disk", "No space left on device")],
)
def test_what_cannot_be_printed_is_one_line(stream: str, why: str) -> None:
    command = [sys.executable, "-m", "hybrid", "--version"]
    with subprocess.Popen(
        command, stdout=STREAMS[stream](), stderr=subprocess.PIPE, text=True
    ) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, f"hybrid: error: standard output: {why}\n")


def test_a_stopped_run_gives_75_whatever_became_of_its_streams(tmp_path) -> None:
    run, stream = tmp_path / "run", STREAMS["a full disk"]
    job = start(run, "--epochs", "10000", stdout=stream(), stderr=stream())
    limit = monotonic() + 100
    while not checkpoint.complete(run / "checkpoints"):
        assert monotonic() < limit
        sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(100) == 75
    assert checkpoint.complete(run / "checkpoints")
    assert not (run / "run.lock").exists()
