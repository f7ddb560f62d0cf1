"""A rank whose launcher or fellow ranks are gone says so once, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from world import for_mpirun

from hybrid.ranks import launcher
from hybrid.ranks.heartbeat import _seconds

WAITING = Path(__file__).parents[2] / "support" / "waiting_program.py"
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


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launcher_that_does_not_end_the_job_is_ended_with_it(lost, start, tmp_path) -> None:
    log = tmp_path / "log"
    job = start("sh", "-c", f'exec "$@" 2>>{log}', "logged")
    job.mpirun.send_signal(signal.SIGSTOP)
    os.kill(job.ranks[lost], signal.SIGKILL)
    job.end()
    said = f"rank {lost} (process {job.ranks[lost]}) has ended, and the launcher (prterun process "
    assert said in log.read_text()
    assert log.read_text().count("hybrid: error:") == 1
    assert job.mpirun.returncode != 0


def test_a_launcher_that_stands_still_is_spoken_for(start) -> None:
    job = start()
    job.mpirun.send_signal(signal.SIGSTOP)
    os.kill(job.ranks[1], signal.SIGKILL)
    errors = job.end()
    assert errors.count("hybrid: error: rank 1 (process ") == 1
    assert errors.count("hybrid: error:") == 1


@pytest.mark.parametrize("stopped", [True, False])
def test_a_launcher_that_ends_by_itself_is_ended_only_where_it_stands_still(stopped, monkeypatch):
    monkeypatch.setattr(launcher, "_END", "kill -KILL $0")
    other = subprocess.Popen(["sleep", "0.5"])
    found = launcher.Launcher()
    found._pid, found._name = other.pid, "pt_elastic"
    if stopped:
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    found.end()
    assert other.wait(30) == (-signal.SIGKILL if stopped else 0)


@pytest.mark.parametrize("text", ["soon", "-1", "1.5", "86401", "9" * 50])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(text):
    with pytest.raises(ValueError, match=f"HYBRID_HOST_TIMEOUT is '{text}'; write whole seconds"):
        _seconds(text)


def test_it_is_refused_once(mpirun, monkeypatch, tmp_path):
    monkeypatch.setenv("HYBRID_HOST_TIMEOUT", "soon")
    done = mpirun(2, sys.executable, WAITING, tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("HYBRID_HOST_TIMEOUT is 'soon'; write whole seconds") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("operator", "heard"), [("2>>", "theirs"), ("2>", "own")])
def test_what_a_launcher_might_write_over_is_not_written_to_its_file(operator, heard, tmp_path):
    """The shell stands for a launcher that ends, and passes nothing on."""
    said = "from hybrid.ranks.launcher import Launcher; Launcher().say('gone\\n', ends=True)"
    job = f'OMPI_COMM_WORLD_RANK=0 "{sys.executable}" -c "{said}" 2>&1 | cat >own; :'
    subprocess.run(["sh", "-c", f"{{ {job}; }} {operator}theirs"], cwd=tmp_path, check=True)
    found = {name: (tmp_path / name).read_text() for name in ("own", "theirs")}
    assert found == {"own": "", "theirs": "", heard: "gone\n"}
