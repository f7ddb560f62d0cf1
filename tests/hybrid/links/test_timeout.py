"""A rank that stands still ends the job after `links.timeout`, and the reason is said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from unittest import mock

import pytest
from world import for_mpirun

from hybrid.folder import checkpoint
from hybrid.links.communicator import abort, limit_of_waits, start_limited
from hybrid.ranks import launch, stopping


def test_a_stopped_rank_ends_the_job_with_a_reason_and_it_goes_on(tmp_path, hybrid) -> None:
    """A job of its own, which it ends: it waits for eight seconds, as ranks start far apart under
    load."""
    out, mark = tmp_path / "run", f"mark-{tmp_path.name}"
    settings = ("--set", "links.timeout=8", "--set", "train.threads=1", "--batch-size", "64")
    train = (sys.executable, "-m", "hybrid", "train", *settings, "--epochs", 500, "--out", out)
    command = (Path(sys.executable).parent / "mpirun", "-n", 2, *train)
    job = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | for_mpirun() | {"MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = monotonic() + 60
    while len(checkpoint.complete(out / "checkpoints")) < 2:
        assert monotonic() < limit
        sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if _rank(int(pid)) == "1"]
    begin = monotonic()
    os.kill(ranks[0], signal.SIGSTOP)
    _, errors = job.communicate(timeout=100)
    assert monotonic() - begin > 7
    assert job.returncode not in (0, None)
    # for its neighbor, or in a report or a test where all ranks meet
    said = r"hybrid: error: rank 0: it has waited for (block 1|all ranks) for 8 s \(links.timeout\)"
    assert len(re.findall(said, errors)) == errors.count("hybrid: error:") == 1, errors
    assert "Traceback" not in errors
    epochs = checkpoint.read_manifest(checkpoint.complete(out / "checkpoints")[-1])["epoch"] + 1
    status, _, err = hybrid("train", "--resume", "--epochs", epochs, "--out", out)
    assert status == 0, err


@pytest.mark.parametrize("aborted", [False, True])
def test_of_ranks_that_fail_at_once_one_gives_the_reason(aborted, capfd) -> None:
    comm = mock.Mock(rank=0, is_aborted=lambda: aborted)
    abort(comm, KeyboardInterrupt())
    said = "" if aborted else "hybrid: error: interrupted\n"
    assert capfd.readouterr().err == said
    comm.abort.assert_called_once_with(1)


def _rank(pid: int) -> str:
    """The rank of a process, by its environment."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
    return found[0].partition(b"=")[2].decode() if found else ""


class Alone:
    """A rank whose others never come."""

    rank = size = 1

    def __init__(self) -> None:
        self.ended = Event()

    def is_aborted(self) -> bool:
        return False

    def abort(self, status: int) -> None:
        self.ended.set()


def test_what_one_rank_alone_calls_ends_the_job_with_a_reason(capsys) -> None:
    """Such as `evaluate` on rank 0, before there are links that watch over waits."""
    comm = Alone()
    with start_limited(comm, 0.01):
        assert comm.ended.wait(20)
    said = "rank 1: it has waited for the other ranks for 0.01 s (links.timeout): call fit and"
    assert said in capsys.readouterr().err
    for limit in (0, 0.5):
        comm = Alone()
        with start_limited(comm, limit):
            pass
        assert not comm.ended.wait(0.02)
    assert [limit_of_waits(limit) for limit in (None, 0.0, 3.0)] == [1800.0, 0.0, 3.0]


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 1), (2, 0)])
def test_ranks_that_wait_for_the_first_meeting_say_so(monkeypatch, capsys, rank, count) -> None:
    monkeypatch.setattr(launch, "LATE_SECONDS", 0.01)
    with stopping.after(launch.LATE_SECONDS, launch._tell_late, rank, 4):
        sleep(0.1)
    assert capsys.readouterr().err.count(f"rank {rank} of 4 waits for the others") == count
