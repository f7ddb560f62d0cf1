"""A rank whose launcher is gone says so once, and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from ports import listening
from world import for_mpirun

from hybrid.ranks.slurm import PORTS

WAITING = Path(__file__).with_name("waiting_program.py")
WRAPPER = ("sh", "-c", '"$@"; exit $?', "wrapper")


class Job:
    """Three ranks under an mpirun, each waiting for another's message for ever."""

    def __init__(self, folder: Path, *wrapper: str) -> None:
        mpirun = Path(sys.executable).parent / "mpirun"
        command = [mpirun, "-n", 3, *wrapper, sys.executable, WAITING, folder]
        self.mpirun = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | for_mpirun(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ranks: list[int] = []
        self._folder = folder

    def wait_for_ranks(self) -> None:
        self.ranks = [self._process(self._folder / f"rank{rank}") for rank in range(3)]

    def _process(self, file: Path) -> int:
        limit = monotonic() + 100
        while not (file.exists() and file.read_text()):
            assert monotonic() < limit, "the rank does not start"
            assert self.mpirun.poll() is None, "the job has ended"
            sleep(0.05)
        return int(file.read_text())

    def end(self, limit: float = 100) -> str:
        """What mpirun's stderr got, once no rank is left; no end is an error."""
        begin = monotonic()
        _, errors = self.mpirun.communicate(timeout=limit)
        while left := [rank for rank in self.ranks if alive(rank)]:
            assert monotonic() - begin < limit, left
            sleep(0.05)
        return errors


def alive(process: int) -> bool:
    """Whether it runs or could; one that has ended may wait for its parent to take note."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def make(*wrapper: str) -> Job:
        jobs.append(Job(tmp_path, *wrapper))
        jobs[-1].wait_for_ranks()
        return jobs[-1]

    yield make
    for job in jobs:
        job.mpirun.kill()


@pytest.mark.parametrize("wrapper", [(), WRAPPER], ids=["alone", "in a shell script"])
def test_ranks_end_with_their_launcher_and_tell_where_it_would_have(wrapper, start) -> None:
    job = start(*wrapper)
    job.mpirun.kill()
    errors = job.end()
    reason = f"the launcher (prterun process {job.mpirun.pid}) is gone; go on with --resume\n"
    assert errors.endswith(f"hybrid: error: {reason}")
    assert errors.count("hybrid: error:") == 1
    assert "Traceback" not in errors


def test_a_rank_that_is_killed_leaves_the_reason_to_the_launcher(start) -> None:
    job = start()
    os.kill(job.ranks[1], signal.SIGKILL)
    errors = job.end()
    assert job.mpirun.returncode != 0
    assert "exited on signal 9" in " ".join(errors.split())
    assert "hybrid: error:" not in errors


STOPS = "import signal; print('ready', flush=True); signal.sigwait({signal.SIGUSR1})"
EVERYBODY = ("0.0.0.0", "::")


def test_nobody_on_the_network_can_make_mpirun_deaf_to_signals() -> None:
    """One silent connection to PMIx's port does; others of its ports listen to everybody."""
    blocked = (
        f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}}); {STOPS}"
    )
    words = [Path(sys.executable).parent / "mpirun", "-n", "1", sys.executable, "-c", blocked]
    settings = dict([PORTS.split("=")])
    with subprocess.Popen(
        [str(word) for word in words],
        env=os.environ | for_mpirun() | settings,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            ports = listening(job.pid)
            assert {address for address, _ in ports} - {*EVERYBODY} == {"127.0.0.1"}
            silent = [
                socket.create_connection(("127.0.0.1", port), 5)
                for address, port in ports
                if address in EVERYBODY
            ]
            job.send_signal(signal.SIGUSR1)
            assert job.wait(20) == 0
        finally:
            job.kill()
    for connection in silent:
        connection.close()
