"""Nothing that a process has started outlives it, however it ends and whatever it was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from job_processes import VARIABLE, living

PROGRAM = Path(__file__).with_name("orphans_program.py")
SERVERS = 2
"""The fork server and multiprocessing's resource tracker."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """`started(kind)` is the program, its two workers at what they do; they end with the test."""
    root = str(Path(__file__).parents[3])
    environment = os.environ | {VARIABLE: str(tmp_path), "PYTHONPATH": root}

    def start(kind: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, PROGRAM, tmp_path, kind]
        process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
        wanted = 2 + (kind == "forked")
        assert soon(lambda: len([p for p in tmp_path.iterdir() if not p.suffix]) == wanted)
        assert len(living(str(tmp_path))) == 1 + wanted + SERVERS
        return process

    yield start
    for left in living(str(tmp_path)):
        os.kill(left, signal.SIGKILL)


def soon(reached: Callable[[], bool], seconds: float = 100) -> bool:
    """Whether it comes to that."""
    end = monotonic() + seconds
    while not reached() and monotonic() < end:
        sleep(0.01)
    return reached()


@pytest.mark.parametrize("kind", ["idle", "stuck"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["kill", "abort"])
def test_workers_and_their_server_end_with_the_process_they_work_for(
    kind: str, number: signal.Signals, started, tmp_path
) -> None:
    process = started(kind)
    process.send_signal(number)
    process.wait()
    assert soon(lambda: not living(str(tmp_path))), living(str(tmp_path))


def test_they_do_so_where_a_forked_process_has_its_end_of_the_pipe(started, tmp_path) -> None:
    process = started("forked")
    process.kill()
    process.wait()
    forked = int((tmp_path / "forked").read_text())
    workers = {int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()}
    assert soon(lambda: not workers & living(str(tmp_path)).keys())
    assert forked in living(str(tmp_path))


def test_a_worker_whose_process_has_gone_before_it_looks_ends_at_once(started, tmp_path) -> None:
    process = started("late")
    process.kill()
    process.wait()
    assert soon(lambda: not living(str(tmp_path))), living(str(tmp_path))
    assert not list(tmp_path.glob("*.watched"))
