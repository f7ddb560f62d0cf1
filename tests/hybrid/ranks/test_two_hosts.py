"""Two hosts: the bits of one, and an end with a reason when one host or the link is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from commands import command
from torch import Tensor
from trainings import assert_same, weights
from two_hosts import TwoHosts, missing, two_hosts

from hybrid.folder.checkpoint import complete

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SETTINGS = (
    *("--epochs", 4, "--batch-size", 32, "--set", "train.threads=1"),
    *("--set", "data.limit=320", "--set", "train.report_every=4"),
)
WAITING = Path(__file__).parents[2] / "support" / "waiting_program.py"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Tensor]:
    """The weights of the same training on threads."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert command("train", "--blocks", 2, *SETTINGS, "--out", out)[0] == 0
    return weights(out)


@pytest.fixture
def start(hosts, hybrid_cli, tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ranks on both hosts; what is left of them ends with the test."""
    jobs = []

    def job(*words: object, **environment: str) -> subprocess.Popen[str]:
        words = words or (sys.executable, WAITING, tmp_path)
        jobs.append(hosts.mpirun(*words, env=environment))
        return jobs[-1]

    yield job
    for job in jobs:
        job.kill()


@pytest.fixture
def train(start, hybrid_cli, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """Start a training on both hosts, a rank each."""

    def training(*more: object, **environment: str) -> subprocess.Popen[str]:
        words = (hybrid_cli, "train", *SETTINGS, "--out", tmp_path / "run", *more)
        return start(*words, **environment)

    return training


def wait_for(reached: Callable[[], object], job: subprocess.Popen[str]) -> None:
    limit = monotonic() + 90
    while not reached():
        assert monotonic() < limit, "it does not come"
        assert job.poll() is None, "the job has ended"
        sleep(0.05)


def wait_for_checkpoint(run: Path, job: subprocess.Popen[str]) -> None:
    wait_for(lambda: complete(run / "checkpoints"), job)


def seconds_to_the_end(hosts: TwoHosts, limit: float) -> float:
    """How long until no process is left on either host; more than `limit` is an error."""
    begin = monotonic()
    while left := hosts.processes(0) | hosts.processes(1):
        assert monotonic() - begin < limit, left
        sleep(0.1)
    return monotonic() - begin


@pytest.mark.parametrize(
    ("silently", "timeout", "limit"),
    [
        pytest.param(False, 3, 13, id="link down", marks=pytest.mark.slow),
        pytest.param(True, 10, 20, id="packets lost", marks=pytest.mark.slow),
    ],
)
def test_a_cut_link_ends_the_job_on_both_hosts_and_a_resume_has_the_bits(
    silently, timeout, limit, hosts, train, tmp_path, undisturbed
) -> None:
    job = train(**({} if timeout == 10 else {"HYBRID_HOST_TIMEOUT": str(timeout)}))
    wait_for_checkpoint(tmp_path / "run", job)
    hosts.cut(silently)
    seconds_to_the_end(hosts, limit)
    _, errors = job.communicate(timeout=5)
    assert job.returncode not in (0, None)
    silence = f"no sign of life from host {hosts.names[1]} for {timeout} s"
    reason = f"{silence}: the network or the node has failed; go on with --resume"
    assert errors.count(f"hybrid: error: {reason}") == 1
    assert errors.count("hybrid: error:") == 1
    assert "Traceback" not in errors
    hosts.mend()
    job = train("--resume")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert_same(weights(tmp_path / "run"), undisturbed)


@pytest.mark.parametrize(
    ("host", "word"),
    [(0, "prterun"), (1, "prted"), (1, "")],
    ids=["mpirun", "its daemon on the other host", "all of the other host"],
)
def test_what_is_killed_on_one_host_ends_the_job_on_both(host, word, hosts, start, tmp_path):
    # of a lost daemon mpirun may tell first, of a socket that closes MPI in the waiting rank
    others = ("PRTE has lost communication", "An error occurred in Socket closed")
    gone = f"hybrid: the ranks of host {hosts.names[1]} have ended"
    said, tries = [0], 0
    # now and then mpirun kills the other rank the moment it sees a host go, and says nothing
    while not any(said) and tries < 3:
        for file in tmp_path.glob("rank*"):
            file.unlink()
        job, tries = start(), tries + 1
        wait_for(lambda job=job: len(list(tmp_path.glob("rank*"))) == 2, job)
        hosts.kill(host, word)
        seconds_to_the_end(hosts, 100)
        _, errors = job.communicate(timeout=60)
        said = [errors.count(words) for words in ("hybrid: error:", gone, *others)]
    assert max(said) == 1, errors
    if word == "prterun":
        assert "hybrid: error: the launcher (prterun process" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_stopped_rank_and_a_short_cut_are_waited_for(hosts, train, tmp_path, undisturbed):
    job = train(HYBRID_HOST_TIMEOUT="4")
    wait_for_checkpoint(tmp_path / "run", job)
    (rank,) = (
        pid
        for pid, command in hosts.processes(1).items()
        if "hybrid train" in command and "prted" not in command
    )
    os.kill(rank, signal.SIGSTOP)
    sleep(6)
    os.kill(rank, signal.SIGCONT)
    hosts.cut(silently=True)
    sleep(2)
    hosts.mend()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert_same(weights(tmp_path / "run"), undisturbed)
